"""Programmatic dependent launch (sm_90 and up): a kernel starts while the previous one runs, and waits for its results.

Packed codes and scales, which do not depend on those results, are loaded before the wait.

Most kernels that multiply packed weights write out the two instructions: an inlined call gives the same PTX apart from
debug locations, but ptxas then schedules some launches differently.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none, reportAssignmentType=none
# pyright: reportGeneralTypeIssues=none

import triton
import triton.language as tl

from requant_kernels.common.ptx import Ptx


@triton.jit
def wait_for_previous_launch(PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr):
    """Wait, and trigger the next launch: before the wait if EARLY_TRIGGER, otherwise after it.

    After it, the next launch's CTAs find the SMs empty and spread evenly. Earlier ones are all placed on the few SMs that
    still have resources, and stay there: 8192 x 8192, `mul1` at 2 bits, took 22.5 us that way, and 17.4 with the trigger
    after the wait.
    """
    if PDL:
        if EARLY_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not EARLY_TRIGGER:
            tl.extra.cuda.gdc_launch_dependents()


@triton.constexpr_function
def _wait_ptx(count, early_trigger):
    """Wait, and trigger the next launch, before if `early_trigger`. Outputs: the inputs, `count` words.

    The loop ends after one round, or two: it makes a basic block of what is before it, which ptxas does not leave.
    """
    words = [f"${count + i}" for i in range(count)]
    mixed = [f"xor.b32 mixed, mixed, {word};" for word in words[1:]]
    trigger = "griddepcontrol.launch_dependents;"
    lines = [
        ".reg .b32 mixed, other; .reg .pred again;",
        f"mov.b32 mixed, {words[0]};",
        *mixed,
        "mov.b32 other, 0x9e3779b9;",
        trigger if early_trigger else "",
        "WAIT: griddepcontrol.wait;",
        "setp.eq.u32 again, mixed, other;",
        "add.u32 other, other, 1;",
        "@again bra WAIT;",
        "" if early_trigger else trigger,
        *(f"mov.b32 ${i}, {word};" for i, word in enumerate(words)),
    ]
    return Ptx(text="{ " + " ".join(lines) + " }", constraints=",".join(["=r"] * count + ["r"] * count))


@triton.jit
def wait_with(floats, integers, PDL: tl.constexpr, EARLY_TRIGGER: tl.constexpr):
    """`wait_for_previous_launch` of a kernel that has computed these float32 and int32 tensors; returns them.

    Without it, the compiler puts most of what could be computed during the wait behind it, next to its use.
    """
    if PDL:
        words = ()
        for i in tl.static_range(len(floats)):
            words = words + (floats[i].to(tl.int32, bitcast=True),)
        words = words + integers
        types: tl.constexpr = (tl.int32,) * len(words)
        PTX: tl.constexpr = _wait_ptx(len(words), EARLY_TRIGGER)
        words = tl.inline_asm_elementwise(
            PTX.text, PTX.constraints, words, dtype=types, is_pure=False, pack=1
        )
        held = ()
        for i in tl.static_range(len(floats)):
            held = held + (words[i].to(tl.float32, bitcast=True),)
        floats = held
        integers = words[len(floats) :]
    return floats, integers


def pdl_option(pdl: bool) -> dict[str, object]:
    """The option of a launch that may start before the previous one has finished."""
    return {"launch_pdl": True} if pdl else {}
