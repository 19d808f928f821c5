"""Run under TRITON_INTERPRET=1 by `test_products.py`: transforms as two products, and a gate, beside whole matrices."""

import interpreter_fixes  # noqa: F401
import torch
from requant_kernels.fallback import reference
from requant_kernels.hadamard.products import rotate
from requant_kernels.step.rotated_gate import rotated_gate
from requant_kernels.trellis.operands import PARTIAL_SUM_SCALE, ActivationForm, Product
from torch import Tensor
from torch.nn.functional import silu


def close(got: Tensor, wanted: Tensor) -> bool:
    return ((got.double() - wanted).norm() / wanted.norm()).item() < 1e-3


def check_rotation(m: int, k: int) -> None:
    whole, signs = torch.randn(m, k + 16).half(), torch.randn(k).sign().half()
    x, y = whole[:, 16:], torch.full((m + 1, k), 7.0).half()
    rotate(x, signs, y[:m])
    assert close(y[:m], (x.double() * signs.double()) @ reference.hadamard(k)), f"rotation of {k}"
    assert (y[m] == 7).all(), "behind the last token"


def check_gate(m: int, k: int) -> None:
    """Products side by side, one with a bias; by cuBLAS, and sums with a scale."""
    whole, form = torch.randn(m, 2 * k).half(), ActivationForm(columns=k)
    scales, bias = [(torch.randn(k).sign() * 0.5).half() for _ in range(2)], torch.randn(k).half()
    gate = Product(values=whole[:, :k], output_scales=scales[0], bias=None)
    up = Product(values=whole[:, k:], output_scales=scales[1], bias=bias)
    signs, h = torch.randn(k).sign().half(), reference.hadamard(k)
    g, u = (product.values.double() @ h * product.output_scales.double() for product in (gate, up))
    sums = Product(values=(whole[None, :, :k] / PARTIAL_SUM_SCALE), output_scales=scales[0], bias=None)
    for own in (gate, sums):
        got = rotated_gate(own, up, "silu", torch.float16, input_scales=signs, form=form)
        assert close(got.values, (silu(g) * (u + bias.double()) * signs.double()) @ h), f"gate of {k}"


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    check_rotation(5, 768)  # three blocks of 256
    check_rotation(3, 2048)
    check_gate(5, 768)
    check_gate(3, 512)


if __name__ == "__main__":
    main()
