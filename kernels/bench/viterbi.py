"""The search for trellis codes (`requant_kernels/viterbi`): milliseconds for 256 weights on every SM, by code and bits.

    python kernels/bench/viterbi.py --out FILE

Timed: the forward pass and the backtracking of a search with free ends. A tile of codes takes two searches.
"""

import argparse
import json
from pathlib import Path

import torch
from requant_kernels.common.device import num_sms
from requant_kernels.viterbi.gpu import viterbi_paths

WEIGHTS_PER_STEP = {"mul1": 1, "pair": 2}
CODES = [("pair", bits / 4) for bits in range(4, 13)] + [("mul1", bits / 4) for bits in range(4, 21)]
LAUNCHES = 5


def milliseconds(code: str, bits: float) -> float:
    """The time of one search of a sequence per SM, averaged over several after a first."""
    vector = WEIGHTS_PER_STEP[code]
    values = torch.randn(65536, vector, device="cuda").half().float()
    targets = torch.randn(num_sms(values.device), 256 // vector, vector, device="cuda")
    total = int(4 * bits * vector)  # bits of four steps
    shifts = tuple((i + 1) * total // 4 - i * total // 4 for i in range(4))
    viterbi_paths(targets, values, shifts=shifts, pinned=None)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(LAUNCHES):
        viterbi_paths(targets, values, shifts=shifts, pinned=None)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / LAUNCHES


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    found = {f"{code} {bits:g}": milliseconds(code, bits) for code, bits in CODES}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    out.write_text(json.dumps({"about": about, "milliseconds": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
