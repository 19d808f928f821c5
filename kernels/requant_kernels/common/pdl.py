"""Programmatic dependent launch (sm_90 and up): a kernel starts while the previous one runs, and waits for its results.

Packed codes and scales, which do not depend on those results, are loaded before the wait.

Most kernels that multiply packed weights write out the two instructions: an inlined call gives the same PTX apart from
debug locations, but ptxas then schedules some launches differently.
"""

# pyright: reportCallIssue=none, reportArgumentType=none, reportAttributeAccessIssue=none

import triton
import triton.language as tl


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


def pdl_option(pdl: bool) -> dict[str, object]:
    """The option of a launch that may start before the previous one has finished."""
    return {"launch_pdl": True} if pdl else {}
