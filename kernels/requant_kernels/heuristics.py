"""Rules for launches of shapes that no table knows (`launch_config.py`): one function a kernel.

What the rules aim at is the same everywhere: enough bytes in flight to hide the latency of memory, CTAs that spread evenly
over the SMs, and few enough registers that 16 warps fit an SM. None means that the kernel does not want the shape.
"""

from collections.abc import Sequence

import torch

from requant_kernels.common.device import max_smem_bytes, num_sms
from requant_kernels.common.occupancy import ctas_per_sm
from requant_kernels.launch_config import (
    Fp16MmaConfig,
    GemmConfig,
    GemmSm90Config,
    GemvConfig,
    Int8MmaConfig,
    Shape,
    TrellisGemvConfig,
)
from requant_kernels.trellis.codes import CODES
from requant_kernels.trellis.layout import k64_per_unit

ROWS, K_TILE = 16, 256  # of a tile of packed codes


def tiles_of(shape: Shape) -> tuple[int, int]:
    """Tiles of 16 rows, and of 256 columns."""
    return -(-shape.n // ROWS), -(-shape.k // K_TILE)


def _prefers_fp16_mma(shape: Shape) -> bool:
    """Of the tensor-core kernels of a grid: several tokens, or 4 bits without residuals."""
    return shape.m_bucket > 1 or (shape.bits == 4 and "+" not in shape.format)


def int8_mma(shape: Shape, device: torch.device) -> Int8MmaConfig | None:
    """At most two CTAs an SM, and as many tiles each as that takes."""
    if _prefers_fp16_mma(shape):
        return None
    tiles, k_tiles = tiles_of(shape)
    own = next((count for count in (1, 2, 3, 4, 7) if tiles <= 2 * count * num_sms(device)), None)
    if own is None or ("+" in shape.format and own > 4):
        return None
    num_warps = 16 if own <= 2 and k_tiles > 32 else 8 if own <= 4 and k_tiles > 8 else 4
    cap = ctas_per_sm(-(-tiles // own), device)
    return Int8MmaConfig(num_warps=num_warps, tiles_per_cta=own, num_stages=2, max_ctas_per_sm=cap)


def fp16_mma(shape: Shape, device: torch.device) -> Fp16MmaConfig | None:
    """One CTA an SM, so that activations come there once: of up to seven tiles, or of two warp groups of seven. Eight warps
    as long as registers last: with four, times differ by a fifth from one GPU to another."""
    if not _prefers_fp16_mma(shape) or "+" in shape.format:
        return None
    tiles, k_tiles = tiles_of(shape)
    own = next((count for count in (1, 2, 3, 4, 7, 14) if tiles <= count * num_sms(device)), None)
    if own is None:
        return None
    num_warps = min(8 if own <= 4 else 4, 1 << k_tiles.bit_length() - 1)
    warp_groups = 2 if own == 14 and num_warps > 1 else 1
    per_group = own // warp_groups
    return Fp16MmaConfig(
        num_warps=num_warps, tiles_per_warp_group=per_group, num_stages=3 if own == 1 else 2, warp_groups=warp_groups,
        prefetch=own > 4, max_ctas_per_sm=ctas_per_sm(-(-tiles // (per_group * warp_groups)), device),
    )  # fmt: skip


def gemv_stages(shape: Shape) -> tuple[int, bool]:
    """`num_stages` and `prefetch` of GemvConfig: registers hold either codes or activations of further K tiles."""
    several = shape.m_bucket > 1
    if shape.format == "grid" and not several and shape.bits <= 4:
        return (3, False) if shape.bits <= 3 else (2, True)
    if "+" not in shape.format or (not several and shape.bits <= 3 and shape.format == "codebook+s"):
        return 1, True
    return (3 if shape.format.startswith("grid") and shape.bits <= 3 and shape.m_bucket <= 8 else 2), False


def gemv_least_warps(shape: Shape) -> int:
    """The fewest warps a tile: residuals, levels and more tokens are work for several."""
    return 4 if shape.format.startswith("codebook") or shape.m_bucket > 1 else 2 if "+" in shape.format else 1


def gemv_registers(shape: Shape) -> int | None:
    """A thread's registers at most, for 16 warps an SM; None where fewer than it wants would spill."""
    few = shape.bits <= 3 or (shape.bits == 4 and shape.format.startswith("grid"))
    return 128 if shape.m_bucket <= 8 and few else None


def gemv(shape: Shape, device: torch.device) -> GemvConfig:
    """All CTAs run at once, with about 16 warps an SM."""
    tiles, k_tiles = tiles_of(shape)
    max_registers = gemv_registers(shape) if torch.version.hip is None else None
    num_warps = gemv_least_warps(shape)
    most = 16 if max_registers else 8  # 16 warps have 128 registers each
    while num_warps < most and tiles * num_warps < 11 * num_sms(device) and 2 * num_warps <= k_tiles:
        num_warps *= 2
    num_stages, prefetch = gemv_stages(shape)
    return GemvConfig(
        num_warps=num_warps, num_stages=num_stages, prefetch=prefetch, max_registers=max_registers
    )


def gemm(shape: Shape, device: torch.device) -> GemmConfig:
    """Two CTAs of eight warps an SM."""
    num_warps, num_stages = 8, 1
    if device.type == "cuda" and torch.version.hip is None:
        # 512 bytes of shared memory a token and K tile
        num_stages = min(3, max(1, max_smem_bytes(device) // (512 * shape.m_bucket) - 1))
    k_tiles, ctas = tiles_of(shape)[1], -(-shape.n // (ROWS * num_warps))
    split_k = max(1, min(8, k_tiles, 2 * num_sms(device) // ctas))
    return GemmConfig(num_warps=num_warps, split_k=split_k, num_stages=num_stages)


def gemm_sm90(shape: Shape, device: torch.device) -> GemmSm90Config:
    """16 warps an SM, or one CTA of 8 where accumulators or residuals take the registers of the others."""
    ctas_at_once = num_sms(device)
    if shape.m_bucket > 64:
        num_warps = 8
    elif "+" in shape.format:
        num_warps = 16 if shape.bits + (shape.format == "codebook+s") <= 4 else 8
    else:
        num_warps = 4 if shape.n < 128 * num_sms(device) else 8
        ctas_at_once = num_sms(device) * 16 // num_warps
    tokens = min(128, shape.m_bucket)
    ctas = -(-shape.n // (ROWS * num_warps)) * -(-shape.m_bucket // tokens)
    split_k = max(1, min(8, tiles_of(shape)[1] // 4, round(ctas_at_once / ctas)))
    return GemmSm90Config(tokens_per_cta=tokens, num_warps=num_warps, split_k=split_k)


def trellis_gemm_sm90(shape: Shape, device: torch.device) -> GemmSm90Config:
    """The rotation that adds the partial products adds partial sums of its own too: 8 of both together."""
    n, m, k_tiles = shape.n, shape.m_bucket, tiles_of(shape)[1]
    tokens, rows = min(256, m), -(-n // ROWS) * ROWS
    ctas, most = -(-n // 128) * -(-m // tokens), max(1, 8 * 4096 // max(4096, rows & -rows))
    split_k = max(1, min(most, k_tiles, round(num_sms(device) * (2 if m <= 64 else 1) / ctas)))
    small = m == 64 and shape.bits <= 4  # 4 warps of two tiles, else 8 of one
    return GemmSm90Config(
        tokens_per_cta=tokens, num_warps=4 if small else 8, tiles_per_warp=2 if small else 1,
        prefetch_at=2 if tokens == 256 else 0, split_k=split_k,
    )  # fmt: skip


def trellis_gemv(shape: Shape, device: torch.device) -> TrellisGemvConfig:
    """A step of all warps stays within a section of 4096 columns."""
    n, k, bits, m = shape.n, shape.k, shape.bits, shape.m_bucket
    whole = bits == int(bits)  # at quarters of a bit a unit is up to four groups
    if m == 1 and bits <= 4 and CODES[shape.format].byte_sums:
        return trellis_one_token(shape, device)
    small = n <= (4096 if k >= 8192 else 2048) and m != 8
    return TrellisGemvConfig(
        num_warps=16 if small else 8,
        tiles_per_cta=1 if small or m > 8 or bits > 4 else 2,
        units_per_step=2 if whole and bits <= 4 else 1,
    )


def trellis_one_token(shape: Shape, device: torch.device) -> TrellisGemvConfig:
    """`mul1` or `pair`, at most 4 bits: one CTA of 16 warps an SM as long as one takes its tiles, and up to 4096 columns
    each rotates the token for itself (`trellis/fused_hadamard.py`); beyond, CTAs of two tiles."""
    n, k, bits = shape.n, shape.k, shape.bits
    whole = bits == int(bits)
    tiles = next((count for count in (1, 2, 4, 7) if n <= ROWS * count * num_sms(device)), None)
    if tiles is not None and (k <= 4096 or tiles <= 2):
        most = k // (1024 * k64_per_unit(round(4 * bits)))  # units of a warp until some warps have no columns
        if tiles > 2 and not most:
            return TrellisGemvConfig(num_warps=8, tiles_per_cta=2, units_per_step=1)
        long = 4 if k <= 4096 and bits <= 3 else 2 if k > 4096 else 1
        units = 1 if not whole or tiles > 2 else 2 if tiles == 1 else long
        step = 1 << max(1, min(units, most)).bit_length() - 1  # a power of two, which divides a Hadamard tile
        return TrellisGemvConfig(num_warps=16, tiles_per_cta=tiles, units_per_step=step)
    return TrellisGemvConfig(num_warps=8 if whole or tiles == 4 else 4, tiles_per_cta=2, units_per_step=2)


def trellis_group(shapes: Sequence[Shape], device: torch.device) -> list[TrellisGemvConfig]:
    """Several matrices in one launch (`trellis/gemv_group.py`), measured on an H200: CTAs of 16 warps as long as all run at
    once, for one token one an SM, or of seven tiles two after another; else CTAs of four warps and two tiles."""
    k, m, bits = shapes[0].k, shapes[0].m_bucket, max(shape.bits for shape in shapes)
    k64_counts = [k64_per_unit(round(4 * shape.bits)) for shape in shapes]
    an_sm = {1: 1, 2: 1, 3: 1, 4: 1} if m == 1 else {2: 2}  # tiles of a CTA -> CTAs of an SM at most
    if m == 1 and bits <= 3.5:  # of 4 bits they spill
        an_sm[7] = 2
    fitting = (
        tiles
        for tiles, most in an_sm.items()
        if sum(-(-shape.n // (ROWS * tiles)) for shape in shapes) <= most * num_sms(device)
    )
    num_warps, tiles = 16, next(fitting, None)
    if bits > 4 or m > 8:
        num_warps, tiles = 8, 1
    elif tiles is None or k < 1024 * max(k64_counts):  # some of 16 warps would have no columns
        num_warps, tiles = 4, 2
    return [
        TrellisGemvConfig(
            num_warps=num_warps,
            tiles_per_cta=tiles,
            units_per_step=2 if own == 1 and num_warps * tiles <= 16 else 1,
        )
        for own in k64_counts
    ]


def trellis_slots(shape: Shape, slots: int, device: torch.device) -> TrellisGemvConfig:
    """One token times each of `slots` matrices (`experts/`). CTAs of 16 warps that rotate the token for themselves, where
    one an SM takes all tiles; else as many warps as divide the columns, and about 16 an SM."""
    tiles = -(-shape.n // ROWS)
    units = -(-shape.k // (64 * k64_per_unit(round(4 * shape.bits))))
    if CODES[shape.format].byte_sums and shape.bits <= 4 and shape.k <= 4096 and shape.k % 256 == 0:
        counts = (1, 2, 4, 7) if shape.bits <= 3 else (1, 2, 4)  # seven tiles of 4 bits spill
        own = next((count for count in counts if slots * -(-tiles // count) <= num_sms(device)), None)
        if own is not None:
            several = own <= 2 and shape.bits == int(shape.bits) and units % 32 == 0
            return TrellisGemvConfig(num_warps=16, tiles_per_cta=own, units_per_step=2 if several else 1)
    num_warps = next((warps for warps in (8, 4) if units % warps == 0), 8 if units > 8 else 4)
    most = (1,) if shape.bits > 4 or not CODES[shape.format].byte_sums else (1, 2)
    own = next((n for n in most if slots * -(-tiles // n) * num_warps <= 16 * num_sms(device)), most[-1])
    return TrellisGemvConfig(num_warps=num_warps, tiles_per_cta=own, units_per_step=1)
