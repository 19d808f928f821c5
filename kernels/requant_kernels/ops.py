"""The public operations: a linear layer, its matrix, and rows of it, from a packed layout on any device.

Each is backed by one custom operator with a fake implementation, so that `torch.compile` sees no graph break. `dispatch.py`
chooses the kernel.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from requant_kernels.common.device import supports_pdl, supports_ptx
from requant_kernels.common.packing import CodebookLayout, GridLayout, Layout
from requant_kernels.dispatch import dispatch, dispatch_group, shape_of
from requant_kernels.fallback import reference, torch_fallback
from requant_kernels.flat_layout import flatten, layout_of, trellis_layout_of
from requant_kernels.registry import module_of
from requant_kernels.scalar.gemm_sm90_launch import GemmSm90Config
from requant_kernels.trellis.gemm_sm90_launch import PdlPosition, num_ctas, overlapping_configs
from requant_kernels.trellis.layout import TrellisLayout
from requant_kernels.trellis.operands import ActivationForm, Product, RotatedActivations, SplitAttention

DTYPES = (torch.float16, torch.bfloat16)


def linear(
    x: Float[Tensor, "*tokens k"], layout: Layout | TrellisLayout, bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*tokens n"]:
    """`x @ weight^T + bias`, in x's dtype: float16 or bfloat16 on a GPU, any float on the CPU.

    Raises ValueError if x does not fit the layout.
    """
    if x.shape[-1] != layout.k:
        raise ValueError(f"x has {x.shape[-1]} features, but the packed matrix takes {layout.k}")
    if x.device != layout.packed_codes.device:
        raise ValueError(
            f"x is on {x.device}, but the packed matrix is on {layout.packed_codes.device}: move one of them"
        )
    if x.is_cuda and x.dtype not in DTYPES:
        raise ValueError(f"the kernels take float16 or bfloat16 activations, not {x.dtype}: cast them")
    return multiply(x.reshape(-1, layout.k), layout, bias).view(*x.shape[:-1], layout.n)


def multiply(x: Tensor, layout: Layout | TrellisLayout, bias: Tensor | None) -> Tensor:
    """`linear` of x [m, k] without its checks: straight to the kernels if nothing observes the call, otherwise through the
    operator.

    Torch's dispatcher takes longer than a kernel, so an eager call on a GPU avoids it. The compiler, fake tensors, autograd
    and dispatch modes (including the profiler of operators) need to see the operator.
    """
    if x.is_cuda and type(x) is Tensor and not _watched(x):
        return _multiply(x, layout, bias)
    return operator_of(layout)(x, bias, *flatten(layout))


def _watched(x: Tensor) -> bool:
    """Whether anything needs to see the operator."""
    return (
        torch.compiler.is_compiling()
        or (x.requires_grad and torch.is_grad_enabled())
        or torch._C._len_torch_dispatch_stack() > 0
    )


def operator_of(layout: Layout | TrellisLayout) -> Any:
    """The custom operator of a layout: `operator(x [m, k], bias or None, *flatten(layout)) -> y [m, n]`."""
    trellis = isinstance(layout, TrellisLayout)
    return torch.ops.requant.trellis_linear.default if trellis else torch.ops.requant.linear.default


def activation_form(layout: TrellisLayout, num_tokens: int) -> ActivationForm | None:
    """How the kernel for this many tokens reads rotated activations; None if it only supports `linear`."""
    kernel, _ = dispatch(layout, num_tokens, layout.packed_codes.device)
    form: Any = getattr(module_of(kernel), "activation_form", None)
    return None if form is None else form(layout, num_tokens)


def combines_parts(layout: TrellisLayout) -> bool:
    """Whether `product` takes split attention for this layout."""
    kernel, config = dispatch(layout, 1, layout.packed_codes.device)
    rotates_itself: Any = getattr(module_of(kernel), "rotates_itself", None)
    return rotates_itself is not None and rotates_itself(layout, config)


def product(
    x: Tensor | RotatedActivations | SplitAttention, layout: TrellisLayout, bias: Tensor | None = None
) -> Product:
    """A trellis layer without its last rotation, for a layout that has an `activation_form`; x [m, k], rows contiguous, or
    already rotated, or in parts (`combines_parts`)."""
    num_tokens = x.shape[0] if isinstance(x, Tensor) else x.num_tokens
    kernel, config = dispatch(layout, num_tokens, layout.packed_codes.device)
    values = module_of(kernel).product(x, layout, config)
    return Product(values=values, output_scales=layout.output_scales, bias=bias)


def products(
    inputs: Sequence[RotatedActivations], layouts: Sequence[TrellisLayout], biases: Sequence[Tensor | None]
) -> list[Product]:
    """`product` of several layers, with separate or shared rotated activations: in one launch if kernels support it."""
    num_tokens, device = inputs[0].num_tokens, layouts[0].packed_codes.device
    configs = dispatch_group(layouts, num_tokens, device)
    if configs is not None:
        from requant_kernels.trellis.gemv_group import gemv_group  # needs Triton

        found = gemv_group(inputs, layouts, configs)
    else:
        found = _overlapping(_quantized_once(inputs, layouts), layouts, num_tokens, device)
    return [
        Product(values=values, output_scales=layout.output_scales, bias=bias)
        for values, layout, bias in zip(found, layouts, biases, strict=True)
    ]


def _overlapping(
    inputs: Sequence[RotatedActivations],
    layouts: Sequence[TrellisLayout],
    num_tokens: int,
    device: torch.device,
) -> list[Tensor]:
    """The products of several layers, each by its own launch; these overlap where kernels support it."""
    chosen = [dispatch(layout, num_tokens, device) for layout in layouts]
    if len(layouts) == 1 or not all(kernel.overlaps for kernel, _ in chosen):
        return [
            module_of(kernel).product(x, layout, config)
            for (kernel, config), x, layout in zip(chosen, inputs, layouts, strict=True)
        ]
    shapes = tuple(shape_of(layout, num_tokens) for layout in layouts)
    configs = overlapping_configs(shapes, tuple(cast(GemmSm90Config, config) for _, config in chosen), device)
    found: list[Tensor] = []
    ctas_before = 0
    for (kernel, _), config, x, layout in zip(chosen, configs, inputs, layouts, strict=True):
        position = PdlPosition(first=not found, last=len(found) == len(layouts) - 1, ctas_before=ctas_before)
        found.append(module_of(kernel).product(x, layout, config, position))
        ctas_before += num_ctas(config, layout.packed_codes.shape[0], num_tokens)
    return found


def _quantized_once(
    inputs: Sequence[RotatedActivations], layouts: Sequence[TrellisLayout]
) -> list[RotatedActivations]:
    """The inputs, in int8 where a layer's kernel would quantize them first; shared ones are quantized once."""
    made: dict[int, RotatedActivations] = {}
    found = []
    for x, layout in zip(inputs, layouts, strict=True):
        kernel, _ = dispatch(layout, x.num_tokens, layout.packed_codes.device)
        quantize = getattr(module_of(kernel), "quantize", None)
        if quantize is not None and id(x) not in made:
            made[id(x)] = quantize(x)
        found.append(x if quantize is None else made[id(x)])
    return found


def multiply_bands(x: Tensor, layouts: Sequence[TrellisLayout]) -> Tensor | None:
    """`multiply` of x [m, k], rows contiguous, by vertically stacked matrices that read the same rotated activations and do
    not rotate their outputs, in two launches; None if kernels cannot, or something needs to see the operators."""
    if not x.is_cuda or _watched(x):
        return None
    configs = dispatch_group(layouts, x.shape[0], x.device)
    if configs is None:
        return None
    from requant_kernels.trellis.gemv_group import multiply_bands as multiply_bands_cuda  # needs Triton

    return multiply_bands_cuda(x, layouts, configs, x.dtype)


def lookup(
    tokens: Int[Tensor, "*m"], layout: GridLayout | TrellisLayout, dtype: torch.dtype
) -> Float[Tensor, "*m k"]:
    """Rows `tokens` of a grid or trellis without residuals, whose output is not rotated: an embedding.

    On a GPU an invalid token gets row 0, unchecked. Raises ValueError for a matrix that does not support row lookup.
    """
    refusal = lookup_refusal(layout)
    if refusal is not None:
        raise ValueError(refusal)
    flat = tokens.reshape(-1)
    if isinstance(layout, TrellisLayout):
        return lookup_bands(tokens, [layout], dtype)
    own = (layout.packed_codes, layout.scales, layout.zero_points, layout.column_scales)
    sizes = (layout.n, layout.k, layout.bits, layout.group_size, layout.kernel_group)
    rows = torch.ops.requant.lookup(flat, dtype, *own, *sizes)
    return rows.view(*tokens.shape, layout.k)


def lookup_bands(
    tokens: Int[Tensor, "*m"], layouts: Sequence[TrellisLayout], dtype: torch.dtype
) -> Float[Tensor, "*m k"]:
    """`lookup` in vertically stacked matrices with one code and the same input scales."""
    rows = torch.ops.requant.trellis_lookup(
        tokens.reshape(-1), dtype, [own.packed_codes for own in layouts], layouts[0].input_scales,
        [own.output_scales for own in layouts], layouts[0].k, [own.bits for own in layouts], layouts[0].code,
    )  # fmt: skip
    return rows.view(*tokens.shape, layouts[0].k)


def lookup_refusal(layout: Layout | TrellisLayout) -> str | None:
    """Why a matrix does not support row lookup, with the remedy; None if it does."""
    if isinstance(layout, CodebookLayout):
        return "rows are looked up in a grid or a trellis, not in a codebook: quantize the matrix to one"
    trellis = isinstance(layout, TrellisLayout)
    if layout.sparse is not None:
        kind = "trellis" if trellis else "grid"
        return f"rows are looked up in a {kind} without residuals: pack it without"
    if trellis and (layout.rotates_output or layout.parts):
        return (
            "rows are looked up in a trellis whose output is not rotated, and which is not joined of parts: quantize the "
            "matrix without the rotation of its output, and pack it alone"
        )
    return None


def rotate(
    x: Float[Tensor, "*tokens k"],
    *,
    input_scales: Float[Tensor, " k"] | None = None,
    output_scales: Float[Tensor, " k"] | None = None,
) -> Float[Tensor, "*tokens k"]:
    """output_scales * H (input_scales * x) in x's dtype, without gradients; k is a multiple of 16."""
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return torch.ops.requant.rotate(flat, input_scales, output_scales).view(x.shape)


def dequantize(layout: Layout | TrellisLayout, dtype: torch.dtype = torch.float16) -> Shaped[Tensor, "n k"]:
    """The matrix that the layout represents; a trellis is rotated back by full matrices, which is slow."""
    if isinstance(layout, TrellisLayout):
        return reference.weight(layout, torch.float32).to(dtype)
    return torch.ops.requant.dequantize(dtype, *flatten(layout))


def _multiply(x: Tensor, layout: Layout | TrellisLayout, bias: Tensor | None) -> Tensor:
    """x [m, k] times a layout, by the kernel that `dispatch` chooses."""
    if x.shape[0] == 0:
        return x.new_empty(0, layout.n)
    kernel, config = dispatch(layout, x.shape[0], x.device)
    return kernel.linear(x if x.stride(1) == 1 else x.contiguous(), layout, bias, config)


@torch.library.custom_op("requant::linear", mutates_args=())
def _linear(
    x: Tensor, bias: Tensor | None, packed_codes: Tensor, scales: Tensor | None, zero_points: Tensor | None,
    column_scales: Tensor | None, levels: Tensor | None, tables: Tensor | None, row_perm: Tensor | None,
    slice_ptr: Tensor | None, columns: Tensor | None, values: Tensor | None, row_scales: Tensor | None,
    row_nnz: Tensor | None, coo: Tensor | None, block_ptr: Tensor | None, n: int, k: int, bits: int, group_size: int,
    kernel_group: int,
) -> Tensor:  # fmt: skip
    return _multiply(x, layout_of(
        packed_codes, scales, zero_points, column_scales, levels, tables, row_perm, slice_ptr, columns, values,
        row_scales, row_nnz, coo, block_ptr, n, k, bits, group_size, kernel_group,
    ), bias)  # fmt: skip


@_linear.register_fake
def _(x: Tensor, bias: Tensor | None, packed_codes: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], rest[-5])


@torch.library.custom_op("requant::dequantize", mutates_args=())
def _dequantize(
    dtype: torch.dtype, packed_codes: Tensor, scales: Tensor | None, zero_points: Tensor | None,
    column_scales: Tensor | None, levels: Tensor | None, tables: Tensor | None, row_perm: Tensor | None,
    slice_ptr: Tensor | None, columns: Tensor | None, values: Tensor | None, row_scales: Tensor | None,
    row_nnz: Tensor | None, coo: Tensor | None, block_ptr: Tensor | None, n: int, k: int, bits: int, group_size: int,
    kernel_group: int,
) -> Tensor:  # fmt: skip
    layout = layout_of(
        packed_codes, scales, zero_points, column_scales, levels, tables, row_perm, slice_ptr, columns, values,
        row_scales, row_nnz, coo, block_ptr, n, k, bits, group_size, kernel_group,
    )  # fmt: skip
    if not packed_codes.is_cuda or dtype not in DTYPES:
        return torch_fallback.dequantize(layout, dtype)
    from requant_kernels.scalar.dequantize import dequantize as dequantize_cuda

    return dequantize_cuda(layout, dtype)


@_dequantize.register_fake
def _(dtype: torch.dtype, packed_codes: Tensor, *rest: Any) -> Tensor:
    return packed_codes.new_empty(rest[-5], rest[-4], dtype=dtype)


@torch.library.custom_op("requant::trellis_linear", mutates_args=())
def _trellis_linear(
    x: Tensor, bias: Tensor | None, packed_codes: Tensor, input_scales: Tensor | None, output_scales: Tensor,
    row_perm: Tensor | None, slice_ptr: Tensor | None, columns: Tensor | None, values: Tensor | None,
    row_scales: Tensor | None, row_nnz: Tensor | None, k: int, rotates_output: bool, parts: list[int], bits: float,
    code: str,
) -> Tensor:  # fmt: skip
    return _multiply(x, trellis_layout_of(
        packed_codes, input_scales, output_scales, row_perm, slice_ptr, columns, values, row_scales, row_nnz, k,
        rotates_output, parts, bits, code,
    ), bias)  # fmt: skip


@_trellis_linear.register_fake
def _(
    x: Tensor,
    bias: Tensor | None,
    packed_codes: Tensor,
    input_scales: Tensor | None,
    output_scales: Tensor,
    *rest: Any,
) -> Tensor:
    return x.new_empty(x.shape[0], output_scales.shape[0])


@torch.library.custom_op("requant::lookup", mutates_args=())
def _lookup(
    tokens: Tensor, dtype: torch.dtype, packed_codes: Tensor, scales: Tensor, zero_points: Tensor | None,
    column_scales: Tensor | None, n: int, k: int, bits: int, group_size: int, kernel_group: int,
) -> Tensor:  # fmt: skip
    layout = GridLayout(
        packed_codes=packed_codes, scales=scales, zero_points=zero_points, column_scales=column_scales, row_perm=None,
        sparse=None, n=n, k=k, bits=bits, group_size=group_size, kernel_group=kernel_group,
    )  # fmt: skip
    if not packed_codes.is_cuda or len(tokens) == 0:
        return torch_fallback.lookup(tokens, layout, dtype)
    from requant_kernels.scalar.embedding import lookup as lookup_cuda

    return lookup_cuda(tokens.contiguous(), layout, dtype)


@_lookup.register_fake
def _(tokens: Tensor, dtype: torch.dtype, packed_codes: Tensor, *rest: Any) -> Tensor:
    return packed_codes.new_empty(tokens.shape[0], rest[-4], dtype=dtype)


@torch.library.custom_op("requant::trellis_lookup", mutates_args=())
def _trellis_lookup(
    tokens: Tensor, dtype: torch.dtype, packed_codes: list[Tensor], input_scales: Tensor | None,
    output_scales: list[Tensor], k: int, bits: list[float], code: str,
) -> Tensor:  # fmt: skip
    layouts = [
        TrellisLayout(
            packed_codes=codes, input_scales=input_scales, output_scales=scales, n=len(scales), k=k, bits=own, code=code,
            rotates_output=False,
        )
        for codes, scales, own in zip(packed_codes, output_scales, bits, strict=True)
    ]  # fmt: skip
    if not tokens.is_cuda or len(tokens) == 0:
        return torch_fallback.lookup_bands(tokens, layouts, dtype)
    from requant_kernels.trellis.lookup import lookup as lookup_cuda

    return lookup_cuda(tokens.contiguous(), layouts, dtype)


@_trellis_lookup.register_fake
def _(
    tokens: Tensor, dtype: torch.dtype, packed_codes: list[Tensor], input_scales: Tensor | None,
    output_scales: list[Tensor], k: int, bits: list[float], code: str,
) -> Tensor:  # fmt: skip
    return tokens.new_empty(tokens.shape[0], k, dtype=dtype)


@torch.library.custom_op("requant::rotate", mutates_args=())
def _rotate(x: Tensor, input_scales: Tensor | None, output_scales: Tensor | None) -> Tensor:
    """output_scales * H (input_scales * x) of x [m, k], k a multiple of 16, in x's type: see `hadamard/`."""
    if not x.is_cuda:
        y = x.float() if input_scales is None else x.float() * input_scales.float()
        y = y @ reference.hadamard(x.shape[1], torch.float32).to(x.device)
        return (y if output_scales is None else y * output_scales.float()).to(x.dtype)
    from requant_kernels.hadamard.transform import hadamard_transform

    k, y = x.shape[1], torch.empty_like(x)
    hadamard_transform(
        x, y, in_width=k, columns=k, out_width=k, asm=supports_ptx(x.device), pdl=supports_pdl(x.device),
        input_scales=input_scales, output_scales=output_scales,
    )  # fmt: skip
    return y


@_rotate.register_fake
def _(x: Tensor, input_scales: Tensor | None, output_scales: Tensor | None) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("requant::attend", mutates_args=())
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of one token: y [b, 1, h, d] of q [b, h, 1, d], k and v [b, heads, length, d], mask bool [b, length]."""
    if q.is_cuda:
        from requant_kernels.step.attention import attend

        return attend(q, k, v, mask, scale)
    group = q.shape[1] // k.shape[1]
    scores = q.float() @ k.repeat_interleave(group, 1).float().mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    y = scores.softmax(-1) @ v.repeat_interleave(group, 1).float()
    return y.transpose(1, 2).to(q.dtype).contiguous()


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return q.new_empty(q.shape[0], 1, q.shape[1], q.shape[3])
