"""Fused steps of trellis codes: with their rotations the logits are those of the model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from requant_kernels import pack_trellis
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from requant.formats.hadamard import random_signs
from requant.formats.packed_spec import PackedSpec
from requant.formats.trellis import Trellis
from requant.inference.convert import convert_to_kernels
from requant.inference.decode import Decoder
from requant.inference.kernel_layers import BandedLinear, KernelEmbedding, KernelLinear
from requant.inference.quant_linear import QuantLinear


@pytest.mark.parametrize(
    "kind",
    [
        "ends",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3", "fine", "ends float16")),
    ],
)
def test_with_the_assembly_emulated(interpreted, kind: str) -> None:
    interpreted("emulate_trellis_block.py", *kind.split())


@pytest.mark.slow
def test_a_mixture_with_the_assembly_emulated(interpreted) -> None:
    interpreted("emulate_trellis_mixture.py")


SHAPES = {  # hidden, intermediate, heads, heads of keys
    "llama": (4096, 14336, 32, 8),
    "qwen2": (2048, 8192, 32, 8),  # biases; a block of two tiles
    "qwen3": (3072, 9728, 24, 8),  # norms of heads; blocks of 1024 and 512
}


def random_trellises(kind: str, code: str) -> Any:
    """Two blocks on the kernels, through a checkpoint's own layers; k has other bits than q and v."""
    hidden, intermediate, heads, key_heads = SHAPES[kind]
    config = AutoConfig.for_model(
        kind, hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=hidden // heads, num_hidden_layers=2, vocab_size=256,
        max_position_embeddings=128,
    )  # fmt: skip
    with torch.device("cuda"):
        model: Any = (
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
        )
    for name, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            n, k = layer.weight.shape
            bits = 3 if name.endswith("k_proj") else 2
            dense = Trellis(
                codes=torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device="cuda"),
                input_scales=random_signs(k, seed=0).half().cuda(),
                output_scales=(random_signs(n, seed=1) * k**-0.5).half().cuda(), bits=bits, code=code,
            )  # fmt: skip
            spec, tensors = dense.pack()
            own = QuantLinear(
                PackedSpec(dense=spec), bias=layer.bias is not None, dtype=torch.bfloat16, device="cuda"
            )
            for suffix, tensor in tensors.items():
                own.get_buffer(suffix).copy_(tensor)
            if layer.bias is not None:
                own.bias = nn.Parameter(torch.randn_like(layer.bias) * 0.1, requires_grad=False)
            model.model.set_submodule(name, own)
    return convert_to_kernels(model, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("code", "shape"),
    [
        ("mul1", (1, 7)),
        ("mul1", (1, 12)),
        ("mul1", (5, 70)),
        ("mul1", (2, 600)),
        ("pair", (1, 70)),
        ("pair", (5, 70)),
    ],
)
def test_fused_prompts_give_the_same_logits(
    kind: str, code: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `gemv.py`, `gemm_sm90.py` on Hopper (`pair` up to 128 tokens as half sums), and cuBLAS."""
    from requant.inference.trellis_block import TrellisBlock

    monkeypatch.setattr("requant.inference.kernel_check.TOKENS", (shape[0] * shape[1],))
    model, tokens = random_trellises(kind, code), torch.randint(0, 256, shape, device="cuda")
    fused, plain = (Decoder(model, length=shape[1] + 8, fused=fused) for fused in (True, False))
    for _ in range(2):  # by the model alone, then with the fused blocks compared beside it
        fused.prefill(tokens)
        fused.reset()
    wanted, got = plain.prefill(tokens), fused.prefill(tokens)
    (blocks,) = fused.fused_prefill.found.values()
    assert blocks is not None and isinstance(blocks[0], TrellisBlock)
    limit = (
        5e-2  # activations are rounded to 8 bits, here and there from values that differ in their last bit
    )
    assert ((got - wanted).norm() / wanted.norm()).item() < limit
    for mine, other in zip(fused.cache.layers, plain.cache.layers, strict=True):
        assert ((mine.keys - other.keys).norm() / other.keys.norm()).item() < limit
        assert ((mine.values - other.values).norm() / other.values.norm()).item() < limit


@pytest.mark.gpu
def test_prompts_may_be_longer_or_shorter_than_those_that_were_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`pair` reads half sums up to 128 rows, and others from there on."""
    monkeypatch.setattr("requant.inference.kernel_check.TOKENS", (40,))
    model = random_trellises("qwen2", "pair")
    fused, plain = (Decoder(model, length=320, fused=fused) for fused in (True, False))
    for length in (60, 60, 60, 300, 90, 300, 300, 90, 90, 20, 90):
        tokens = torch.randint(0, 256, (1, length), device="cuda")
        wanted, got = plain.prefill(tokens), fused.prefill(tokens)
        assert ((got - wanted).norm() / wanted.norm()).item() < 5e-2, length
        fused.reset(), plain.reset()
    assert len(fused.fused_prefill.found) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    ("code", "batch"), [("mul1", 1), ("mul1", 5), ("mul1", 12), ("mul1", 40), ("pair", 5), ("pair", 40)]
)
def test_captured_steps_give_the_same_logits(
    kind: str, code: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `gemv.py` and, beyond eight sequences on Hopper, `gemm_sm90.py`."""
    monkeypatch.setattr("requant.inference.kernel_check.TOKENS", (batch,))  # the others take long to compile
    model = random_trellises(kind, code)
    tokens = torch.randint(0, 256, (batch, 70), device="cuda")
    fused, apart, plain = (
        Decoder(model, length=100, **options)
        for options in ({}, {"fuses_rotations": False}, {"fused": False})
    )
    for decoder in (fused, apart, plain):
        decoder.prefill(tokens)
        decoder.tokens.copy_(fused.tokens)
    for _ in range(4):
        wanted, beside, got = plain.step(), apart.step(), fused.step()
        assert fused.fused is not None and fused.fused.fuses_rotations and fused.captured is not None
        assert apart.fused is not None and not apart.fused.fuses_rotations and plain.fused is None
        for other in (wanted, beside):
            limit = (
                5e-2 if 5 <= batch <= 16 else 3e-2
            )  # activations rounded to 8 bits differ by a step now and then
            assert ((got - other).norm() / other.norm()).item() < limit
        for decoder in (fused, apart):
            decoder.tokens.copy_(plain.tokens)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 5, 8])
def test_steps_between_an_embedding_and_a_head_in_bands(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one sequence o combines the parts of the attention itself."""
    monkeypatch.setattr("requant.inference.kernel_check.TOKENS", (batch,))
    model = random_trellises("llama", "mul1")
    embedding, head = in_bands(4096), in_bands(4096)
    plain = SimpleNamespace(padding_idx=None, dtype=torch.bfloat16, scale=None, _parameters={})
    model.set_input_embeddings(KernelEmbedding(embedding, cast(Any, plain), tied=False))
    model.set_output_embeddings(head)
    tokens = torch.randint(0, 256, (batch, 300), device="cuda")
    fused, plain = (Decoder(model, length=400, fused=fused) for fused in (True, False))
    for decoder in (fused, plain):
        decoder.prefill(tokens)
        decoder.tokens.copy_(fused.tokens)
    for _ in range(4):
        wanted, got = plain.step(), fused.step()
        assert fused.fused is not None and type(fused.fused.inputs).__name__ == "TrellisInputs"
        assert fused.fused.head is not None and fused.fused.blocks[0].splits == (batch == 1)
        assert ((got - wanted).norm() / wanted.norm()).item() < 5e-2
        fused.tokens.copy_(plain.tokens)


def in_bands(k: int) -> BandedLinear:
    """Two bands of 128 rows, of other widths, on a GPU."""
    signs, bands = random_signs(k, seed=3).half().cuda(), []
    for bits in (5, 4):
        codes = torch.randint(0, 1 << bits, (128, k), dtype=torch.uint8, device="cuda")
        scales = torch.full((128,), k**-0.5, dtype=torch.float16, device="cuda")
        bands.append(
            KernelLinear(pack_trellis(codes, signs, scales, bits=bits, code="mul1", rotates_output=False))
        )
    return BandedLinear(bands)
