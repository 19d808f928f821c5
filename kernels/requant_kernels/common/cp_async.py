"""The weight pipeline of the GEMV kernels, in Gluon: cp.async copies packed codes and scales to a multistage buffer.

A stage holds, for every warp, one k_tile (256 columns) of its row tiles: the packed codes, 512 bytes for one 32-bit word
of all lanes, then the scales and, if the grid has them, the zero points, 4 bytes per lane and group. Every lane copies
exactly the bytes that it will read itself, so its own `cp.async.wait_group` is enough: no barrier, and no registers for
loads in flight. 32 consecutive lanes read 512 consecutive bytes, without bank conflicts.

`cp.async` has no L2 policy here: with one, ptxas of CUDA 12.8 and 13.1 may use an uninitialized register, which
the GPU rejects as an illegal instruction.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none

from dataclasses import dataclass
from functools import cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.inline_ptx import issue
from requant_kernels.common.packing import GridLayout, Layout, k_tiles_per_scale, scales_per_k_tile
from requant_kernels.common.ptx import Ptx, inline_ptx


def supports_grid(layout: Layout) -> bool:
    """Whether the kernels that multiply masked codes support the dense part: a grid of 2 to 4 bits in whole k_tiles, groups
    of 128 columns or more, aligned for 16-byte copies."""
    if not isinstance(layout, GridLayout) or layout.bits > 4 or layout.column_scales is not None:
        return False
    whole = layout.k % 256 == 0 and layout.kernel_group % 128 == 0
    zeros = layout.zero_points is None or layout.kernel_group > 0
    return whole and zeros and layout.packed_codes.data_ptr() % 16 == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightStage:
    """One warp's part of a pipeline stage: a k_tile of `tiles` row tiles of a grid."""

    bits: int
    group: int  # columns per scale; 0: one scale per row, which the kernel applies at its end
    zeros: bool  # whether there are zero points beside the scales
    tiles: int

    @property
    def scales(self) -> int:
        """Scales per row and k_tile."""
        return scales_per_k_tile(self.group)

    @property
    def k_tiles_per_scale(self) -> int:
        return k_tiles_per_scale(self.group)

    @property
    def code_bytes(self) -> int:
        return self.tiles * self.bits * 512

    @property
    def bytes(self) -> int:
        return self.code_bytes + self.tiles * self.scales * 128 * (2 if self.zeros else 1)

    @property
    def load(self) -> Ptx:
        return load_k_tile_ptx(self.bits, self.scales, self.tiles, zeros=self.zeros)


def weight_stage(layout: GridLayout, tiles: int) -> WeightStage:
    zeros = layout.zero_points is not None
    return WeightStage(bits=layout.bits, group=layout.kernel_group, zeros=zeros, tiles=tiles)


@cache
def load_k_tile_ptx(bits: int, scales: int, tiles: int, *, zeros: bool = False) -> Ptx:
    """Copy a k_tile of `tiles` row tiles, as one cp.async group.

    Operands: shared addresses of the codes and of the scales, whether the k_tile exists (the group is committed anyway, so
    that wait counts stay fixed), global addresses of every tile's codes, scales and zero points.
    """
    inputs = {"to_codes": "r", "to_scales": "r", "exists": "r"}
    lines = ["setp.ne.s32 p, $exists, 0;"]
    for t in range(tiles):
        inputs[f"codes{t}"] = "l"
        for i in range(bits):
            lines.append(
                f"@p cp.async.cg.shared.global [$to_codes + {512 * (bits * t + i)}], [$codes{t} + {512 * i}], 16;"
            )
    for t in range(tiles * (1 + zeros)):
        inputs[f"scales{t}"] = "l"
        for i in range(scales):
            lines.append(
                f"@p cp.async.ca.shared.global [$to_scales + {128 * (scales * t + i)}], [$scales{t} + {32 * i}], 4;"
            )
    return inline_ptx([*lines, "cp.async.commit_group;"], inputs=inputs, registers={"pred": "p"})


@gluon.jit
def weight_pointers(
    codes_ptr, scales_ptr, zeros_ptr, first_tile, last_tile, lane, k_tiles, STAGE: gl.constexpr
):
    """Pointers to this lane's codes and scales of k_tile 0, for every row tile; zero points follow the scales.

    Tiles past `last_tile` repeat `last_tile`, which is computed and written more than once, identically.
    """
    TILES: gl.constexpr = STAGE.tiles
    codes, scales, zeros = (), (), ()
    for r in gl.static_range(TILES):
        tile = gl.minimum(first_tile + r, last_tile).to(gl.int64)
        codes = codes + (codes_ptr + tile * k_tiles * (STAGE.bits * 128) + lane * 4,)
        groups = gl.cdiv(k_tiles, STAGE.k_tiles_per_scale) * STAGE.scales
        scales = scales + (
            scales_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + tile * groups * 8 + lane // 4,
        )
        if zeros_ptr is not None:
            zeros = zeros + (
                zeros_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + tile * groups * 8 + lane // 4,
            )
    return codes, scales + zeros


@gluon.jit
def load_k_tile(codes, scales, to_codes, to_scales, k_tile, k_tiles, STAGE: gl.constexpr):
    """Start copying `k_tile` `[warp, 1]` of every row tile to the shared addresses of a stage."""
    LOAD: gl.constexpr = STAGE.load
    exists = (k_tile < k_tiles).to(gl.int32)
    sources = ()
    for r in gl.static_range(len(codes)):
        sources = sources + ((codes[r] + k_tile * (STAGE.bits * 128)).to(gl.int64),)
    for r in gl.static_range(len(scales)):
        sources = sources + (
            (scales[r] + k_tile // STAGE.k_tiles_per_scale * (8 * STAGE.scales)).to(gl.int64),
        )
    issue(LOAD, (to_codes, to_scales, exists) + sources)
