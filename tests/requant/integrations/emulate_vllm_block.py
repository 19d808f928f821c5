"""Run under TRITON_INTERPRET=1 by `test_vllm_block.py`: decoder layers of vLLM's shape, fused, with the assembly emulated,
give what they give with every matrix multiplied by the reference."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path += [str(Path(__file__).parents[3] / "tests" / folder) for folder in ("kernels", "requant/inference")]

import emulated_assembly
import torch
from cases import random_trellis
from emulate_trellis_block import REFERENCE, in_one_launch, on_the_gemv
from requant_kernels import dispatch, ops, pack_trellis
from requant_kernels.trellis.gemv_kernel import MOST_EXACT_TOKENS
from torch import Tensor, nn

from requant.inference import kernel_check
from requant.inference.kernel_layers import KernelLinear
from requant.integrations import vllm_block

HIDDEN, MLP, HEADS, KEY_HEADS, HEAD_DIM, POSITIONS = 128, 192, 4, 2, 32, 100
SIGNS = {k: torch.randn(k, generator=torch.Generator().manual_seed(k)).sign().half() for k in (128, 192)}


class RMSNorm(nn.Module):
    """As vLLM's: with what is added to x, gives the sum too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((1 + 0.3 * torch.randn(width)).half())
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        total = x if residual is None else x + residual
        wide = total.float()
        y = (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).half() * self.weight
        return y if residual is None else (y, total)


class Linear(nn.Module):
    """As a layer of the plugin: matrices of `bits`, joined where they agree and are neighbours."""

    def __init__(self, k: int, sizes: list[int], bits: tuple[float, ...], *, bias: bool = False) -> None:
        super().__init__()
        self.input_size, self.output_partition_sizes = k, sizes
        self.bias = nn.Parameter(torch.randn(sum(sizes)).half() * 0.1) if bias else None
        self.kernels = nn.ModuleList()
        groups: list[tuple[float, list[int]]] = []
        for own, size in zip(bits, sizes, strict=True):
            if groups and groups[-1][0] == own:
                groups[-1][1].append(size)
            else:
                groups.append((own, [size]))
        for own, parts in groups:
            codes, _, scales = random_trellis(sum(parts), k, own, "cpu")
            layout = pack_trellis(
                codes, SIGNS[k], scales / scales.abs().max() * k**-0.5, bits=own, code="mul1",
                parts=tuple(parts) if len(parts) > 1 else (),
            )  # fmt: skip
            self.kernels.append(KernelLinear(layout))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        y = torch.cat([kernel(x) for kernel in self.kernels], -1)
        return (y if self.bias is None else y + self.bias), None


class Rope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_neox_style = True
        angles = torch.arange(POSITIONS)[:, None] * 100.0 ** -torch.linspace(0, 1, HEAD_DIM // 2)
        self.register_buffer("cos_sin_cache", torch.cat([angles.cos(), angles.sin()], 1).half())

    def forward(self, positions: Tensor, *parts: Tensor) -> list[Tensor]:
        cos, sin = self.get_buffer("cos_sin_cache")[positions][:, None].float().chunk(2, -1)
        turned = []
        for part in parts:
            low, high = part.float().unflatten(-1, (-1, HEAD_DIM)).chunk(2, -1)
            turned.append(torch.cat([low * cos - high * sin, high * cos + low * sin], -1).flatten(1).half())
        return turned


class Attention(nn.Module):
    """Of a token to itself, which is enough to see q, k and v."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (-1, HEAD_DIM)).float() for part in (q, k, v)]
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in heads[1:])
        return (torch.sigmoid((heads[0] * k).sum(-1, keepdim=True)) * v).flatten(1).half()


class SelfAttention(nn.Module):
    def __init__(self, name: str, bits: tuple[float, ...], *, bias: bool, normed: bool) -> None:
        super().__init__()
        self.head_dim = HEAD_DIM
        self.sizes = [HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM, KEY_HEADS * HEAD_DIM]
        self.qkv_proj = Linear(HIDDEN, self.sizes, bits, bias=bias)
        self.o_proj = Linear(HEADS * HEAD_DIM, [HIDDEN], (2,))
        self.rotary_emb, self.attn = Rope(), Attention(f"{name}.attn")
        if normed:
            self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.sizes, -1)
        if hasattr(self, "q_norm"):
            q, k = (
                norm(part.unflatten(-1, (-1, HEAD_DIM))).flatten(1)
                for norm, part in ((self.q_norm, q), (self.k_norm, k))
            )
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))[0]


class Mlp(nn.Module):
    def __init__(self, bits: tuple[float, ...]) -> None:
        super().__init__()
        self.gate_up_proj = Linear(HIDDEN, [MLP, MLP], bits)
        self.down_proj = Linear(MLP, [HIDDEN], (2,))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)[0]


class DecoderLayer(nn.Module):
    def __init__(self, name: str, bits: tuple[float, ...], **options: bool) -> None:
        super().__init__()
        self.self_attn = SelfAttention(f"{name}.self_attn", bits[:3], **options)
        self.mlp = Mlp(bits[3:])
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(HIDDEN), RMSNorm(HIDDEN)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    def __init__(self, bits: tuple[float, ...], **options: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(f"model.layers.{i}", bits, **options) for i in range(2))
        self.norm = RMSNorm(HIDDEN)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return self.norm(hidden_states, residual)[0]


def vllm_config(**changes: Any) -> Any:
    """What `fuse` asks of vLLM's."""
    given: dict[str, Any] = {
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "lora_config": None,
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=16),
        "quant_config": SimpleNamespace(rotation=None),
        "compilation_config": SimpleNamespace(static_forward_context={}),
        "additional_config": {},
    }
    return SimpleNamespace(**(given | changes))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


@torch.no_grad()
def check(bits: tuple[float, ...], rows: tuple[int, ...], **options: bool) -> None:
    model, config = LlamaModel(bits, **options), vllm_config()
    inputs = [(torch.randint(POSITIONS, (m,)), torch.randn(m, HIDDEN).half()) for m in rows]
    wanted = [model(positions, x.clone()) for positions, x in inputs]
    said: list[str] = []
    vllm_block.logger.info = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
    assert not vllm_block.fuse(model, config), "no kernel of the CPU takes rotated activations"
    assert len(said) == 1 and said[0].endswith("that the kernels of this device take"), said
    ops.dispatch, ops.dispatch_group = on_the_gemv, in_one_launch
    kernel_check.TOKENS = (2,)
    with reference_for_plain_layers():
        assert vllm_block.fuse(model, config)
    assert vllm_block.is_fused(model) and config.additional_config == {"requant_fused_layers": 2}
    context = SimpleNamespace(no_compile_layers=config.compilation_config.static_forward_context)
    sys.modules["vllm"] = ModuleType("vllm")
    sys.modules["vllm.forward_context"] = double = ModuleType("vllm.forward_context")
    double.get_forward_context = lambda: context  # type: ignore[attr-defined]
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for (positions, x), expected in zip(inputs, wanted, strict=True):
        got = model(positions, x.clone())
        limit = 2e-2 if len(x) > MOST_EXACT_TOKENS else 5e-3  # activations are rounded to 8 bits
        error = relative_error(got, expected)
        assert error < limit, f"{len(x)} rows are off by {error}"
        rows = x.clone()
        if len(rows) > 1:  # as vLLM does: an error where a number of rows would become a constant
            torch._dynamo.mark_dynamic(rows, 0)
        assert torch.equal(compiled(positions, rows), got), "torch.compile changes it"
    ops.dispatch, ops.dispatch_group = REFERENCE, dispatch.dispatch_group


class reference_for_plain_layers:
    """What the check compares with is multiplied by the reference, which is exact and fast."""

    def __enter__(self) -> None:
        self.plain = vllm_block._plain

        def plain(*arguments: Any) -> list[Tensor]:
            ops.dispatch = REFERENCE
            try:
                return self.plain(*arguments)
            finally:
                ops.dispatch = on_the_gemv

        vllm_block._plain = plain

    def __exit__(self, *_: object) -> None:
        vllm_block._plain = self.plain


def check_differs(said: list[str]) -> None:
    """Layers that compute something else stay as they are."""
    model, config = LlamaModel((2, 2, 2, 2, 2), bias=False, normed=False), vllm_config()
    for layer in model.layers:
        layer.post_attention_layernorm.forward = lambda x, residual: (x, x + residual)  # type: ignore[method-assign]
    ops.dispatch, ops.dispatch_group = on_the_gemv, in_one_launch
    with reference_for_plain_layers():
        assert not vllm_block.fuse(model, config) and not vllm_block.is_fused(model)
    assert len(said) == 1 and "LlamaModel give another" in said[0], said
    assert not config.compilation_config.static_forward_context
    ops.dispatch, ops.dispatch_group = REFERENCE, dispatch.dispatch_group


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulated_assembly.emulate_in_models()
    if sys.argv[1] == "joined":
        check((2, 2, 2, 2, 2), (1, 5), bias=False, normed=False)
    else:
        check((4, 3, 4, 2.25, 3), (2,), bias=True, normed=True)
        said: list[str] = []
        vllm_block.logger.warning = lambda text, *values: said.append(text % values)  # type: ignore[method-assign]
        check_differs(said)


if __name__ == "__main__":
    main()
