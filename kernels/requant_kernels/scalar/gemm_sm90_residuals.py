"""Residuals of `gemm_sm90.py`: they become part of the weights, so they cost the same for any number of tokens.

The COO entries of a k64_stage (`common/sparse.py`) are scattered into a zeroed tile of shared memory that belongs to the
warp. Every lane loads the residuals of its weights as addends of its dequantization (`gemm_sm90_ptx.py`), and the same
stores with zeros then clear the tile. None of this makes warps wait for each other.

A lane holds two entries of a k_tile, in registers from one k_tile to the next. If a k_tile has more than 64, the rest is
read again in every k64_stage.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportIndexIssue=none, reportAttributeAccessIssue=none
# pyright: reportGeneralTypeIssues=none, reportAssignmentType=none

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common.inline_ptx import compute_tuple, issue
from requant_kernels.common.ptx import SYNCWARP, Ptx, inline_ptx
from requant_kernels.common.wgmma import codes_layout
from requant_kernels.scalar.gemm_sm90_ptx import MMA_PER_STAGE

TILE_BYTES = gl.constexpr(2048)  # residuals of a row tile's k64_stage in shared memory
DEFAULT_SMEM = 48 << 10  # bytes of shared memory that a CTA gets without opting in to more
NO_ENTRY = gl.constexpr(1 << 30)  # belongs to no k64_stage
SIXTEEN = gl.constexpr((gl.int32,) * 16)

# zero this lane's 16 bytes of every mma_k16
CLEAR_TILE = gl.constexpr(
    inline_ptx(
        ["mov.b32 zero, 0;", *(f"st.shared.v4.b32 [$address + {512 * i}], {{zero, zero, zero, zero}};" for i in range(4))],
        inputs={"address": "r"}, registers={"b32": "zero"},
    )
)  # fmt: skip
# store the value of an entry, its low half, if it belongs to this stage
SCATTER = gl.constexpr(
    inline_ptx(
        "setp.eq.s32 p, $entry_stage, $stage;\nmov.b32 {l, h}, $entry; @p st.shared.b16 [$address], l;",
        inputs=dict.fromkeys(("address", "entry_stage", "stage", "entry"), "r"), registers={"pred": "p", "b16": "l, h"},
    )
)  # fmt: skip


def _scatter_rest(convert: str) -> Ptx:
    """The entries of a k_tile beyond two rounds of 32, read again for every stage; `value_mask` 0 stores zeros
    instead of their values.

    Completes SCATTER: the values (or zeros) are visible to every lane before another lane stores a value of
    the next stage at the same address.
    """
    return inline_ptx(
        f"""add.s32 i, $first, 64;
MORE: .pragma "nounroll"; setp.ge.s32 p, i, $end; @p bra DONE;
mad.wide.s32 address, i, 4, $entries; ld.global.b32 entry, [address];
shr.s32 offset, entry, 26; setp.eq.s32 p, offset, $stage;
shr.u32 offset, entry, 15; and.b32 offset, offset, 0x7FE; add.s32 offset, offset, $tile;
and.b32 entry, entry, $value_mask; mov.b32 {{l, h}}, entry; {convert}@p st.shared.b16 [offset], l;
add.s32 i, i, 32; bra MORE;
DONE: {SYNCWARP}""",
        inputs={"entries": "l"} | dict.fromkeys(("first", "end", "tile", "stage", "value_mask"), "r"),
        registers={"pred": "p", "b16": "l, h", "b32": "i, offset, entry", "b64": "address"},
    )


_ROUND_TO_BF16 = "{ .reg .f32 v; cvt.f32.f16 v, l; cvt.rn.bf16.f32 l, v; }"
SCATTER_REST = gl.constexpr(_scatter_rest(""))
SCATTER_REST_BF16 = gl.constexpr(_scatter_rest(_ROUND_TO_BF16 + " "))
VALUE_TO_BF16 = gl.constexpr(
    inline_ptx(
        f"mov.b32 {{l, h}}, $entry; {_ROUND_TO_BF16} mov.b32 $rounded, {{l, h}};",
        outputs={"rounded": "=r"}, inputs={"entry": "r"}, registers={"b16": "l, h"},
    )
)  # fmt: skip
# this lane's 16 bytes of every mma_k16
LOAD_RESIDUALS = gl.constexpr(
    inline_ptx(
        [
            *(
                f"ld.shared.v4.b32 {{{', '.join(f'$r{4 * i + j}' for j in range(4))}}}, [$address + {512 * i}];"
                for i in range(MMA_PER_STAGE)
            ),
            SYNCWARP,
        ],
        outputs={f"r{i}": "=&r" for i in range(16)}, inputs={"address": "r"},
    )
)  # fmt: skip


def x_stages(tokens: int, tiles: int, *, sparse: bool) -> int:
    """Stages of activations, a k_tile each, to allocate; two are used.

    Triton opts in to more than DEFAULT_SMEM bytes if its own allocation is larger, and does not know of the bytes that
    `declare_smem_ptx` adds for residuals. If only the sum is larger, its own part is enlarged; otherwise the launch would
    fail.
    """
    stage, declared = 512 * tokens, TILE_BYTES.value * tiles if sparse else 0
    barriers = 16
    return (
        2 if not DEFAULT_SMEM - declared < 2 * stage + barriers <= DEFAULT_SMEM else DEFAULT_SMEM // stage + 1
    )


# Device functions.


@gluon.jit
def declare(CONFIG: gl.constexpr):
    """The shared address of the CTA's residuals, one tile per row tile."""
    return gl.inline_asm_elementwise(CONFIG.residual_smem, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_bounds(block_ptr, tiles, k_tile, k_tiles, end):
    """The start and end of a k_tile's entries."""
    at = tiles * (k_tiles + 1) + k_tile
    return gl.load(block_ptr + at, mask=k_tile < end, other=0), gl.load(
        block_ptr + at + 1, mask=k_tile < end, other=0
    )


@gluon.jit
def load_entries(coo_ptr, bounds, lane):
    """The first two rounds of 32 entries of a k_tile, `[R, W, 32]` each."""
    at = bounds[0] + lane
    first = gl.load(coo_ptr + at, mask=at < bounds[1], other=NO_ENTRY)
    return first, gl.load(coo_ptr + at + 32, mask=at + 32 < bounds[1], other=NO_ENTRY)


@gluon.jit
def scatter_targets(entries, base, dtype):
    """The operands of SCATTER for both rounds: shared address, k64_stage, value."""
    made = ()
    for i in gl.static_range(2):
        value = entries[i]
        if dtype == gl.bfloat16:
            value = _value_to_bf16(value, VALUE_TO_BF16)
        made = made + (base + (entries[i] >> 15 & 0x7FE), entries[i] >> 26, value)
    return made


@gluon.jit
def _value_to_bf16(entry, PTX: gl.constexpr):
    return gl.inline_asm_elementwise(PTX.text, PTX.constraints, [entry], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scatter(targets, coo_ptr, bounds, lane, base, q, dtype, VALUES: gl.constexpr):
    """Store the residuals of k64_stage q, or zeros to clear them."""
    stage = gl.full_like(base, q)
    for i in gl.static_range(2):
        value = targets[3 * i + 2] if VALUES else gl.full_like(base, 0)
        issue(SCATTER, [targets[3 * i], targets[3 * i + 1], stage, value])
    pointer = (lane * 0).to(gl.int64) + coo_ptr.to(gl.int64)
    rest = [pointer, bounds[0] + lane, bounds[1], base, stage, gl.full_like(base, -1 if VALUES else 0)]
    if dtype == gl.bfloat16:
        issue(SCATTER_REST_BF16, rest)
    else:
        issue(SCATTER_REST, rest)


@gluon.jit
def addends(targets, coo_ptr, bounds, lane, base, q, dtype, W: gl.constexpr, R: gl.constexpr):
    """The residuals of k64_stage q as operands of its dequantization."""
    _scatter(targets, coo_ptr, bounds, lane, base, q, dtype, True)
    r = compute_tuple(LOAD_RESIDUALS, [base + lane * 16], SIXTEEN)
    _scatter(targets, coo_ptr, bounds, lane, base, q, dtype, False)
    operands = ()
    for i in gl.static_range(4):
        both = gl.join(gl.join(r[4 * i], r[4 * i + 1]), gl.join(r[4 * i + 2], r[4 * i + 3]))  # .. rh kh
        both = gl.reshape(gl.permute(both, (0, 1, 2, 4, 3)), [R, W, 32, 4])
        operands = operands + (gl.convert_layout(both, codes_layout(W, R), assert_trivial=True),)
    return operands
