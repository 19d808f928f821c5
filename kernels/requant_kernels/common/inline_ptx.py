"""Gluon device functions around inline PTX (`ptx.py`): one element of every operand per thread."""

# pyright: reportCallIssue=none, reportArgumentType=none, reportOperatorIssue=none, reportAttributeAccessIssue=none

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from requant_kernels.common import ptx

SMEM_UNIT = gl.constexpr(1024)  # bytes: shared memory is allocated in multiples of it
_SMEM_BASE, _LOAD_F32 = gl.constexpr(ptx.SMEM_BASE), gl.constexpr(ptx.LOAD_F32)


def smem_units(size: int) -> int:
    """The number of SMEM_UNIT that hold `size` bytes."""
    return -(-size // SMEM_UNIT.value)


def allocated_bytes(size: int) -> int:
    """`size` rounded up to whole units."""
    return smem_units(size) * SMEM_UNIT.value


@gluon.jit
def issue(PTX: gl.constexpr, operands):
    """Run PTX for its effect on memory."""
    gl.inline_asm_elementwise(PTX.text, PTX.constraints, operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def compute_f32(PTX: gl.constexpr, operands):
    """The one output of PTX, a float32."""
    return gl.inline_asm_elementwise(
        PTX.text, PTX.constraints, operands, dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def compute_tuple(PTX: gl.constexpr, operands, TYPES: gl.constexpr):
    """The outputs of PTX, as many as TYPES."""
    return gl.inline_asm_elementwise(PTX.text, PTX.constraints, operands, dtype=TYPES, is_pure=False, pack=1)


@gluon.jit
def issue_scalar(TEXT: gl.constexpr):
    """An instruction without operands, for example a wait; once per thread."""
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allocate_smem(UNITS: gl.constexpr):
    """The kernel's one allocation, of UNITS x SMEM_UNIT bytes that only PTX uses, and its address."""
    region = gl.allocate_shared_memory(
        gl.int8, [UNITS, 1, SMEM_UNIT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    return region, smem_base()


@gluon.jit
def keep_smem(region, never, WARPS: gl.constexpr):
    """A use of the allocation if `never`, unknown to the compiler, is true; without a use it would be dropped."""
    if never:
        region.index(0).store(
            gl.zeros([1, SMEM_UNIT], gl.int8, layout=gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0]))
        )


@gluon.jit
def smem_base():
    """The shared memory address of the kernel's one allocation."""
    return gl.inline_asm_elementwise(_SMEM_BASE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_f32(address):
    """One float32 from shared memory."""
    return compute_f32(_LOAD_F32, [address])
