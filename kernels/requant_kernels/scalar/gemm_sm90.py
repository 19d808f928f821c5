"""17 tokens and more on Hopper: arrange the activations, multiply (`wgmma.py`), add the partial products.

Imported where it runs: Gluon is part of Triton from 3.6 on.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from requant_kernels.common.fragment_dequant import scaled_activations
from requant_kernels.common.launch import launch
from requant_kernels.common.packing import CodebookLayout, Layout
from requant_kernels.launch_config import HopperConfig
from requant_kernels.scalar.gemm_sm90_kernel import multiply_kernel, x_layout
from requant_kernels.scalar.gemm_sm90_ptx import decoding, reserve_asm, stages
from requant_kernels.scalar.permute import permute_activations
from requant_kernels.scalar.splitk_reduce import splitk_reduce


def hopper(x: Tensor, layout: Layout, bias: Tensor | None, config: HopperConfig) -> Tensor:
    """y [m, n] of x [m, k], rows contiguous. One split of a matrix without residuals is written as it comes out."""
    m, k = x.shape
    name = "fp16" if x.dtype == torch.float16 else "bf16"
    tiles, blocks = layout.packed_codes.shape[0], -(-k // 256)
    steps = -(-blocks // min(blocks, config.split))
    split, token_tiles = -(-blocks // steps), -(-m // config.tokens)
    width = token_tiles * config.tokens
    direct, sparse = split == 1 and layout.row_perm is None, layout.sparse is not None
    if isinstance(layout, CodebookLayout):
        assert layout.tables is not None
        scales, zeros, group = layout.tables[int(name == "bf16")], None, 0
    else:
        scales, group = layout.scales.view(torch.int32), layout.kernel_group
        zeros = None if layout.zero_points is None else layout.zero_points.view(torch.int32)
    kind = "codebook" if isinstance(layout, CodebookLayout) else "grid"
    constants = _constants(kind, layout.bits, name, group, zeros is not None, sparse, direct, config)
    entries, bounds = (None, None) if layout.sparse is None else (layout.sparse.coo, layout.sparse.block_ptr)
    permuted, inverse_perm = permute_activations(
        scaled_activations(x, layout), blocks, layout.row_perm, layout.n, pdl=True
    )
    y = torch.empty(m, layout.n, dtype=x.dtype, device=x.device)
    partial = y if direct else torch.empty(split, tiles * 16, width, dtype=torch.float32, device=x.device)
    activations = TensorDescriptor.from_tensor(permuted, [config.tokens, 256], x_layout())
    launch(
        multiply_kernel,
        (-(-tiles // (config.warps * config.tiles)), split, token_tiles),
        (
            activations, layout.packed_codes, scales, zeros, entries, bounds, bias if direct else None, partial, blocks,
            tiles - 1, steps, tiles * 16, width, m, layout.n, y.stride(0),
        ),
        constants,
    )  # fmt: skip
    if not direct:
        splitk_reduce(partial, inverse_perm, bias, y, pdl=True)
    return y


@cache
def _constants(
    kind: str,
    bits: int,
    dtype: str,
    group: int,
    zeros: bool,
    sparse: bool,
    direct: bool,
    config: HopperConfig,
) -> dict[str, object]:
    """Of one kind of launch."""
    tiles = config.warps * config.tiles
    return {
        **decoding(kind, bits, dtype, group, zeros=zeros, sparse=sparse),
        "RESERVE": reserve_asm(tiles) if sparse else None,
        "N": config.tokens, "W": config.warps, "R": config.tiles, "AHEAD": config.ahead, "DIRECT": direct, "PDL": True,
        "STAGES": stages(config.tokens, tiles, sparse=sparse), "num_warps": config.warps, "launch_pdl": True,
    }  # fmt: skip
