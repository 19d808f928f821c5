"""Run under TRITON_INTERPRET=1 by `test_trellis_block.py`: a fused step of a mixture, its router and experts of several
widths in a launch each, the assembly emulated, gives the logits of transformers' step with its experts one by one."""

import itertools
from typing import Any

import emulate_trellis_block as dense
import emulated_assembly
import torch
from requant_kernels import dispatch, ops
from requant_kernels.experts.step import experts_step
from requant_kernels.trellis.operands import Product
from transformers import AutoConfig, AutoModelForCausalLM

from requant.inference import experts
from requant.inference.fused_prefill import read_prompts
from requant.inference.fused_step import PlainBlock, fused_steps
from requant.inference.static_cache import SharedLengthCache
from requant.inference.trellis_block import TrellisBlock
from requant.inference.trellis_mixture import TrellisMixture, trellis_mixture
from requant.models.experts import Experts, unfuse_experts
from requant.text.kv_cache import with_cache

SIZES = dense.SIZES | {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}
WIDTHS = (2, 2.5, 3)


def random_mixture() -> Any:
    """The first block has a plain MLP, the second six experts, whose matrices have three widths."""
    config = AutoConfig.for_model("qwen3_moe", **SIZES, mlp_only_layers=[0])
    model: Any = AutoModelForCausalLM.from_config(config).half().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else noise * 0.5)
    unfuse_experts(model)
    signs = {k: torch.randn(k).sign().half() for k in (128, 192)}
    widths = itertools.cycle(WIDTHS)
    for module in list(model.model.layers.modules()):
        linears = {
            name: child for name, child in module.named_children() if isinstance(child, torch.nn.Linear)
        }
        for name, linear in linears.items():
            dense.put_on_the_kernels(module, {name: linear}, next(widths), signs)
    return model


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulated_assembly.emulate_in_models()
    model = random_mixture()
    layer = next(module for module in model.modules() if isinstance(module, Experts))
    prompts, tokens = torch.randint(0, 60, (2, 9)), torch.tensor([[3], [45]])
    caches = [empty_cache(model) for _ in range(3)]
    for cache in caches:
        model(prompts, **with_cache(model, cache))
        cache.add(9)
    wanted = model(tokens, **with_cache(model, caches[0])).logits[:, -1]

    ops.dispatch, ops.dispatch_group = dense.on_the_gemv, dense.in_one_launch
    experts.supports = lambda _device: True
    experts.group_experts(model)
    assert isinstance(layer.step, experts.ExpertsStep) and layer.step.router is not None
    assert len(layer.step.gate_up.by_bits) > 1
    step, plain = fused_steps(model, 2, 100)
    first, second = step.blocks
    assert isinstance(first, TrellisBlock) and isinstance(second, TrellisBlock)
    assert isinstance(second.mlp, TrellisMixture) and second.mlp.step is layer.step
    assert isinstance(plain.blocks[0], PlainBlock)
    check("a step", step(tokens, caches[1]), wanted, 5e-3)

    check_prefill(second.block, layer)

    # by the mixture's own modules, between the block's launches
    handle = second.block.mlp.gate.register_forward_hook(lambda *_: None)
    step, _ = fused_steps(model, 2, 100)
    handle.remove()
    assert isinstance(step.blocks[1].mlp, TrellisMixture) and step.blocks[1].mlp.step is None
    layer.step = None
    check("a step of the model's own experts", step(tokens, caches[2]), wanted, 5e-3)
    scratch, own = empty_cache(model), empty_cache(model)
    logits = read_prompts(model, step.blocks, prompts[:, :2], scratch, 0)
    ops.dispatch, ops.dispatch_group = dense.REFERENCE, dispatch.dispatch_group
    check("prompts", logits, model(prompts[:, :2], **with_cache(model, own)).logits[:, -1], 5e-3)


def check_prefill(block: Any, layer: Any) -> None:
    """More tokens than a step has: the kernels' router, and experts that add to the residual stream."""
    size, seen = block.mlp.gate.weight.shape[1], []
    x = torch.randn(18, size).half()
    delta = Product(values=torch.randn(18, size), output_scales=torch.rand(size).half(), bias=None)
    wanted = x.clone()
    own = trellis_mixture(block, 18)
    assert own is not None and own.step is layer.step  # there is no Hopper
    TrellisMixture(block, None, None)(wanted, delta)

    def prefill(x, gate_up, down, chosen, weights, *, gated, into, tokens_per_cta):
        seen.append((chosen.dtype, tokens_per_cta))
        return experts_step(x, gate_up, down, chosen, weights, gated=gated, into=into)

    experts.experts_prefill = prefill
    layer.prefill = experts.ExpertsPrefill(layer.step)
    own = trellis_mixture(block, 18)
    assert own is not None and own.step is None and own.prefill == (layer.step.router, layer.prefill)
    own(x, delta)
    layer.prefill = None
    assert seen == [(torch.int32, None)]
    check("a prompt's experts", x, wanted, 5e-3)


def empty_cache(model: Any) -> SharedLengthCache:
    return SharedLengthCache(model.config, 100, torch.device("cpu"))


def check(what: str, logits: torch.Tensor, wanted: torch.Tensor, limit: float) -> None:
    error = ((logits.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error < limit, f"{what}: logits are off by {error:.1e}"


if __name__ == "__main__":
    main()
