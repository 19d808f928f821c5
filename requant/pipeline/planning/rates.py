"""How fast GPUs and CPUs are at what a run does, with where it was measured: what planned times follow from."""

import time
from functools import cache

import torch

# Operations a second of whole passes on an H200 in bfloat16, and their share of a plain product's rate, by device type. Two
# H100s of 7.0e14 each reach 4.1e14 in statistics of an 8B shape and 3.8e14 in training (eval/results/speed-8b-h100.json),
# one H200 4.2e14 in training of the 1B shape; at the width of bench-32m, 512, an H100 reaches about a sixth of that.
H200_RATE = 4.0e14
FRACTION_OF_PEAK = {"cpu": 0.35, "cuda": 0.57}
# Training whose blocks are compiled is as much faster: one H200 took 53 s for 200 steps of the 1B shape as a whole, 67 block
# by block (eval/results/speed-1b-h200.json), where passes at the rate above would take 66 and 83.
COMPILED = 1.23
# of the first training and of the last one: what they took longer there, without states
COMPILE_SECONDS = 10.0
# Python's own time for a block and a batch, forward and back, which a GPU waits for in models of 1B: passes took 67 ms for
# 16 blocks there, the original's states 26.
LAUNCH_SECONDS = (1.6e-3, 2.6e-3)
FULL_WIDTH = 2048  # of hidden states; on a GPU, the rate of narrower models is in proportion to it
FULL_STEP = 160  # sequences of a decoding step that takes as long as a forward pass over as many tokens (8B on an H200)
# A decoding step of a batch on a GPU: its launches, and the bytes per second at which it reads weights, keys and values.
# So 6144 windows of 1024 tokens of bench-32m take 25 s; an H100 took 22 at most (what the stages of a run leave).
STEP_SECONDS = 1e-3
STEP_BYTES = 2e12
# For a model larger than the GPU: bytes per second from weight files in the host's memory, over pinned memory, to the GPU;
# and to unpack and decode a weight (`finetune/decoded_block.py`): an H100 decodes trellis codes of 2 bits in 0.34 ns.
HOST_BYTES = 20e9
DECODE_SECONDS = 4e-10
SENT_BYTES = 2e11  # a second, of decoded matrices and gradients between GPUs: over NVLink; over PCIe a tenth
ADAM_SECONDS = 1.1e-11  # to update a parameter: 14 ms of the 1B shape's 1.24e9 on an H100
# For a weight of an expert in a step of training, whichever tokens come: it is made from its code, cast and read, and so is
# its gradient. An H200 took 0.27 s a step for 3.6e9 of them, of which 0.10 are the arithmetic of the parameters that a token
# meets (eval/results/speed-30b-a3b-h200.json).
EXPERT_SECONDS = 4.7e-11
# To predict what a weight in trellis codes loses, at all widths, by device type: mostly factors of Hessians. One CPU core
# takes 0.15 to 0.33 us for matrices of bench-32m's size, 1.3 for one of 4096 x 1024. An H100 took 6.2 ns for one of
# 14336 x 4096, 2.9 for one of 4096 x 4096, when a product with the Hessian was part of it.
PREDICTION_SECONDS = {"cpu": 4e-7, "cuda": 6e-9}


@cache
def product_rate(dtype: torch.dtype, device: str) -> float:
    """Floating-point operations a second of a square matrix product."""
    if device == "cuda" and not torch.cuda.is_available():
        return H200_RATE / FRACTION_OF_PEAK[device]
    size = 4096 if device == "cuda" else 768
    a = torch.randn(size, size, device=device, dtype=dtype)
    torch.mm(a, a)
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.1:
        torch.mm(a, a)
        runs += 1
        if device == "cuda":
            torch.cuda.synchronize()
    return 2 * size**3 * runs / (time.perf_counter() - start)
