"""Run under TRITON_INTERPRET=1 by `test_vllm_block.py` where vLLM imports: vLLM's Llama, loaded and fused, the assembly
emulated, gives what its own layers give.

    python emulate_vllm_llama.py CHECKPOINT
"""

import logging
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[3] / "tests" / folder) for folder in ("kernels", "requant/inference")]

import emulated_assembly
import torch
from emulate_trellis_block import REFERENCE, in_one_launch, on_the_gemv
from emulate_vllm_block import reference_for_plain_layers
from requant_kernels import ops
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm_model import load

from requant.inference import kernel_check
from requant.integrations import vllm_block


class Attention(nn.Module):
    """Of a token to itself, which is enough to see q, k and v."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).float() for part in (q, k, v))
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        return (torch.sigmoid((q * k).sum(-1, keepdim=True)) * v).flatten(1).half()


@torch.no_grad()
def main(path: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    emulated_assembly.emulate_in_models()
    kernel_check.TOKENS = (2,)
    logging.basicConfig(level=logging.INFO)
    CustomOp.dispatch_forward = lambda self, *_, **__: self.forward_native  # compiled ones are not here
    fuse = vllm_block.LayerPieces.__init__

    def on_a_gpu(*arguments: Any) -> None:
        ops.dispatch, ops.dispatch_group = on_the_gemv, in_one_launch
        fuse(*arguments)

    vllm_block.LayerPieces.__init__ = on_a_gpu  # type: ignore[method-assign]
    with reference_for_plain_layers():
        model, config = load(path, dtype="float16")  # the interpreter truncates to bfloat16
    layers: Any = model.model.layers
    assert vllm_block.is_fused(model)
    for layer in layers:
        layer.self_attn.attn = Attention(layer.self_attn.head_dim)
    x, positions = torch.randn(5, model.config.hidden_size).half(), torch.randint(64, (5,))

    def run() -> Tensor:
        hidden, residual = x.clone(), None
        with set_forward_context(None, config):
            for layer in layers:
                hidden, residual = layer(positions, hidden, residual)
        return model.model.norm(hidden, residual)[0]

    got = run()
    ops.dispatch = REFERENCE
    for layer in layers:
        layer.__class__ = type(layer).__mro__[2]
    assert not vllm_block.is_fused(model)
    wanted = run()
    error = ((got - wanted).float().norm() / wanted.float().norm()).item()
    assert error < 3e-3, f"the fused layers are off by {error:.2g}"


if __name__ == "__main__":
    main(sys.argv[1])
