"""Run under TRITON_INTERPRET=1 by `test_trellis_block.py`: a fused step with its rotations, the assembly emulated, gives the
logits of transformers' step with every matrix multiplied by the reference."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

import emulated_assembly
import torch
from cases import random_trellis
from requant_kernels import TrellisLayout, dispatch, ops, pack_trellis
from requant_kernels.registry import TRELLIS_KERNELS, Kernel
from requant_kernels.trellis.gemv_kernel import MOST_EXACT_TOKENS
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from requant.inference import trellis_ends
from requant.inference.fused_prefill import read_prompts
from requant.inference.fused_step import FusedStep, PlainBlock, fused_steps
from requant.inference.kernel_layers import BandedLinear, FusedLinear, KernelEmbedding, KernelLinear, Sibling
from requant.inference.static_cache import static_cache
from requant.inference.step_inputs import step_inputs
from requant.inference.trellis_block import TrellisBlock, TrellisMLP
from requant.inference.trellis_ends import TrellisInputs
from requant.models.targets import SIBLINGS
from requant.text.kv_cache import with_cache

SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64, "max_position_embeddings": 128, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
REFERENCE = ops.dispatch


CONFIG = TrellisGemvConfig(num_warps=2, tiles_per_cta=4, units_per_step=1)
GROUPS: list[int] = []  # matrices of each launch


def on_the_gemv(*_: Any) -> tuple[Kernel, TrellisGemvConfig]:
    """What a GPU would be asked for."""
    return next(kernel for kernel in TRELLIS_KERNELS if kernel.name == "trellis_gemv"), CONFIG


def in_one_launch(layouts: Sequence[TrellisLayout], *_: Any) -> list[TrellisGemvConfig] | None:
    """What `dispatch_group` would say on a GPU."""
    GROUPS.append(len(layouts))
    return [CONFIG] * len(layouts) if len(layouts) > 1 else None


def random_model(kind: str, bits: dict[str, float]) -> Any:
    """Every linear of a block a trellis, its input signs those of its width; siblings of equal bits are one matrix."""
    config = AutoConfig.for_model(kind, **SIZES)
    model: Any = AutoModelForCausalLM.from_config(config).half().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else noise * 0.5)
    signs = {k: torch.randn(k).sign().half() for k in (128, 192)}
    for parent in [part for block in model.model.layers for part in (block.self_attn, block.mlp)]:
        layers = {name: child for name, child in parent.named_children() if isinstance(child, nn.Linear)}
        for names in (*SIBLINGS, *((name,) for name in layers)):
            for own in {bits.get(name, 2) for name in names}:
                group = {
                    name: layers.pop(name) for name in names if bits.get(name, 2) == own and name in layers
                }
                if group:
                    put_on_the_kernels(parent, group, own, signs)
    return model


def put_on_the_kernels(
    parent: Any, layers: dict[str, nn.Linear], bits: float, signs: dict[int, torch.Tensor]
) -> None:
    sizes, k = [layer.out_features for layer in layers.values()], next(iter(layers.values())).in_features
    codes, _, scales = random_trellis(sum(sizes), k, bits, "cpu")
    biases = [layer.bias for layer in layers.values() if layer.bias is not None]
    layout = pack_trellis(
        codes, signs[k], scales / scales.abs().max() * k**-0.5, bits=bits, code="mul1",
        parts=tuple(sizes) if len(sizes) > 1 else (),
    )  # fmt: skip
    matrix = KernelLinear(layout, torch.cat(biases) if biases else None)
    if len(sizes) == 1:
        setattr(parent, next(iter(layers)), matrix)
        return
    siblings = FusedLinear(matrix, sizes)
    for index, name in enumerate(layers):
        setattr(parent, name, Sibling(siblings, index))


@torch.no_grad()
def check(kind: str, batch: int, length: int, bits: dict[str, float], launches: int) -> None:
    model = random_model(kind, bits)
    cache = static_cache(model, 100)
    assert cache is not None
    model(torch.randint(0, 60, (batch, 70)), **with_cache(model, cache))
    cache.add(70)
    tokens = torch.randint(0, 60, (batch, 1))
    wanted = model(tokens, **with_cache(model, cache)).logits[:, -1]
    held = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    for layer in cache.layers:
        assert layer.keys is not None and layer.values is not None
        layer.keys[:, :, 70], layer.values[:, :, 70] = 0, 0
    ops.dispatch = on_the_gemv
    step, _ = fused_steps(model, batch, 100)
    block = step.blocks[0]
    assert isinstance(block, TrellisBlock) and isinstance(block.mlp, TrellisMLP), kind
    matrices = [len(readers.matrices) for readers in (block.qkv, block.mlp.gate_up, block.mlp.down)]
    assert sum(matrices) == launches
    apart = step(tokens, cache)
    ops.dispatch_group = in_one_launch
    logits = step(tokens, cache)
    assert torch.equal(logits, apart), f"{kind}: in one launch, products are others"
    assert 2 * matrices == GROUPS
    GROUPS.clear()
    ops.dispatch_group = dispatch.dispatch_group
    error = ((logits.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error < 5e-3, f"{kind}: logits are off by {error:.1e}"
    for (key, value), layer in zip(held, cache.layers, strict=True):
        for got, want in ((layer.keys, key), (layer.values, value)):
            assert ((got - want).float().norm() / want.float().norm()).item() < 5e-3, f"{kind}: cache"
    prompts, scratch, own = (
        torch.randint(0, 60, (batch, length)),
        static_cache(model, 8),
        static_cache(model, 8),
    )
    assert scratch is not None and own is not None
    logits = read_prompts(model, step.blocks, prompts, scratch, 0)
    ops.dispatch = REFERENCE
    wanted = model(prompts, **with_cache(model, own)).logits[:, -1]
    limit = 2e-2 if batch * length > MOST_EXACT_TOKENS else 5e-3  # activations are rounded to 8 bits
    assert ((logits.float() - wanted.float()).norm() / wanted.float().norm()).item() < limit, (
        f"{kind}: prompts"
    )
    for layer, other in zip(scratch.layers, own.layers, strict=True):
        for got, want in ((layer.keys, other.keys), (layer.values, other.values)):
            assert got is not None and want is not None
            assert ((got - want).float().norm() / want.float().norm()).item() < limit, (
                f"{kind}: cache of prompts"
            )
    (plain,) = fused_steps(model, batch, 100)
    assert isinstance(plain.blocks[0], PlainBlock)


@torch.no_grad()
def check_ends(sequences: int, bits: float) -> None:
    """Embedding and head in bands of codes: a step gives the logits of the same blocks between the modules themselves."""
    model = random_model(
        "llama", {f"{name}_proj": bits for name in ("q", "k", "v", "o", "gate", "up", "down")}
    )
    embedding, head = (in_bands(model.lm_head.out_features, 128) for _ in range(2))
    plain = SimpleNamespace(padding_idx=None, dtype=torch.float16, scale=None, _parameters={})
    model.set_input_embeddings(KernelEmbedding(embedding, cast(Any, plain), tied=False))
    model.set_output_embeddings(head)
    cache = static_cache(model, 100)
    assert cache is not None
    ops.dispatch, ops.dispatch_group = REFERENCE, dispatch.dispatch_group
    model(torch.randint(0, 60, (sequences, 9)), **with_cache(model, cache))
    cache.add(9)
    tokens = torch.tensor([[3], [45], [7], [63], [20]])[:sequences]  # of either band
    ops.dispatch, ops.dispatch_group = on_the_gemv, in_one_launch
    trellis_ends.dispatch_group = in_one_launch
    step, _ = fused_steps(model, sequences, 100)
    assert isinstance(step.inputs, TrellisInputs) and step.head is not None
    logits, keys = step(tokens, cache), [layer.keys.clone() for layer in cache.layers]
    wanted = FusedStep(model, step_inputs(model, 100), step.blocks)(tokens, cache)
    error = ((logits.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error < 2e-3, f"logits are off by {error:.1e}"
    for got, layer in zip(keys, cache.layers, strict=True):
        assert layer.keys is not None
        assert ((got - layer.keys).float().norm() / layer.keys.float().norm()).item() < 2e-3


def in_bands(n: int, k: int) -> BandedLinear:
    """Two bands of other widths, whose outputs are not rotated."""
    signs, bands = torch.randn(k).sign().half(), []
    for bits in (5, 4):
        codes, _, scales = random_trellis(n // 2, k, bits, "cpu")
        scales = scales / scales.abs().max() * k**-0.5
        bands.append(
            KernelLinear(pack_trellis(codes, signs, scales, bits=bits, code="mul1", rotates_output=False))
        )
    return BandedLinear(bands)


# architecture -> sequences, tokens of a prompt, bits where they are not the model's, products of a block
CASES = {
    "qwen2": ("qwen2", 1, 2, {"q_proj": 4, "k_proj": 3, "v_proj": 4}, 4),
    "qwen3": ("qwen3", 2, 5, {"k_proj": 2.25, "up_proj": 3}, 5),
    # float16 of fine codes, and of those that read the same as one
    "fine": ("llama", 5, 2, {"k_proj": 4, "gate_proj": 4, "up_proj": 3.5, "down_proj": 4}, 5),
}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulated_assembly.emulate_in_models()
    if sys.argv[1] == "ends":
        check_ends(2, 2) if len(sys.argv) == 2 else check_ends(5, 4)  # in bytes, in float16
    else:
        check(*CASES[sys.argv[1]])


if __name__ == "__main__":
    main()
