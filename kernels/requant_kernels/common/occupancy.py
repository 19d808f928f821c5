"""Dynamic shared memory as an occupancy cap.

With programmatic dependent launch, the first CTAs of a kernel are placed on the SMs that the previous kernel leaves
free, as many as fit, and stay there (8192 x 8192, 2 bits: 12.4 us with space for six CTAs per SM, 9.05 with space for
four, an even share). Padding the dynamic shared memory of a launch caps its CTAs per SM (`launch.py`).

Launches of a few CTAs are affected too, although most SMs idle; those that compute more than they load then take almost
twice as long (`step/rotated_gate.py`: 5.4 us instead of 3.6). Half of the shared memory keeps their CTAs apart, a third
lets two share an SM, and so on, which leaves space for the preceding and following launches: with it in the kernels of
`step/`, a step of 64 sequences takes 4 to 6 % less (`overlap-h200.json`). Where CTAs are few, those of other launches go to
other SMs: a step of one or eight sequences takes 1 % less (`steps-h200.json`).
"""

import torch

from requant_kernels.common.device import max_smem_bytes, num_sms

SM_SMEM_BYTES = 227 << 10  # that the CTAs of an SM share
CTA_SMEM_BYTES = 1024  # that the driver reserves per CTA
FEW_CTAS = 4  # a launch for at most one in so many SMs shares none of them with launches before and after it
MOST_SHARED = 4  # CTAs per SM; of more, one too many takes little time


def padded_smem_bytes(max_ctas_per_sm: int | None, device: torch.device) -> int:
    """Bytes of shared memory with which at most `max_ctas_per_sm` CTAs fit on an SM; 0 if there is no cap."""
    if max_ctas_per_sm is None or device.type != "cuda":
        return 0
    most = max_smem_bytes(device) - CTA_SMEM_BYTES
    return max(0, min(most, SM_SMEM_BYTES // max_ctas_per_sm - CTA_SMEM_BYTES))


def fits_cta(smem_bytes: int, device: torch.device) -> bool:
    """Whether a CTA can have this many bytes of shared memory."""
    return smem_bytes <= max_smem_bytes(device) - CTA_SMEM_BYTES


def apart_smem_bytes(ctas: int, device: torch.device) -> int:
    """Bytes of shared memory with which no SM has more CTAs of a launch than its even share; 0 without a GPU, or with a
    share of more than MOST_SHARED.

    No more bytes than that takes, so that other launches' CTAs fit beside them; of few CTAs all, so that none do.
    """
    if device.type != "cuda" or (share := ctas_per_sm(ctas, device)) > MOST_SHARED:
        return 0
    whole = max_smem_bytes(device) - CTA_SMEM_BYTES
    return whole if FEW_CTAS * ctas <= num_sms(device) else min(whole, SM_SMEM_BYTES // (share + 1))


def ctas_per_sm(ctas: int, device: torch.device) -> int:
    """CTAs per SM of a launch that spreads evenly: the cap for a launch that runs alone."""
    return -(-ctas // num_sms(device))
