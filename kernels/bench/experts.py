"""The experts of one block of Qwen3-30B-A3B (128 experts, 8 per token, 2048 x 768) with random weights: ours and bf16.

    python kernels/bench/experts.py --out eval/results/experts-step-h100.json
    python kernels/bench/experts.py --prompts 64 512 4096 --out experts-prefill.json

Timed: the replacement of `mlp.experts` in a step, from tokens, chosen experts and their weights to the sum, without the
router. bf16 is the faster of two: transformers' way (tokens sorted by expert, `grouped_mm`), which a graph can also capture,
and one product per expert, with experts that the host knew before the capture, as no server could. Every call chooses other
experts, so that none finds its weights in the L2 cache. A step that differs from its experts one by one is not timed.

With `--prompts`, the given numbers of tokens go through the layer: grouped (`experts/prefill.py`), with the rule's tokens
per CTA and with each other number; expert by expert, where the host asks how many tokens each has; up to 64 by the step; and
with bf16 `grouped_mm`. Times are per call on an idle GPU, Python included (`us`), and in a CUDA graph (`graph_us`) if
possible.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from requant_kernels import linear
from requant_kernels.common.compile_ahead import compile_ahead
from requant_kernels.common.timing import Timing, cold_time
from requant_kernels.experts.prefill import experts_prefill
from requant_kernels.experts.stack import ExpertStack, stack_experts
from requant_kernels.experts.step import experts_step
from requant_kernels.random_layouts import random_layout
from requant_kernels.trellis.gemm_sm90_launch import GROUP_TOKENS, group_tokens
from torch import Tensor
from torch.nn import functional

EXPERTS, PER_TOKEN, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
PROMPT_CODES = (("mul1", 2), ("pair", 2))
CODES = (("mul1", 2), ("pair", 2), ("mul1", 2.25), ("mul1", 3), ("mul1", 4))
GATE = 2e-2  # relative Frobenius error against the experts one by one, bfloat16


def stack(code: str, bits: float, n: int, k: int, parts: int) -> ExpertStack:
    """Random matrices of all experts, with the input scales of one seed."""
    signs = (torch.randint(0, 2, (k,), device="cuda") * 2 - 1).half()
    layouts = [
        replace(random_layout(code, bits, n, k), input_scales=signs)  # type: ignore[arg-type]
        for _ in range(parts * EXPERTS)
    ]
    return stack_experts(layouts, parts=parts)  # pyright: ignore[reportArgumentType]


def matrix(stack: ExpertStack, index: int):
    """The layout of one matrix."""
    layout = stack.by_bits[stack.index_of[index][0]]
    return replace(layout, packed_codes=stack.codes(index), output_scales=stack.output_scales[index])


def one_by_one(x: Tensor, gate_up: ExpertStack, down: ExpertStack, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x, dtype=torch.float32)
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(chosen.shape[1])).tolist():
        expert, row = int(chosen[token, slot]), x[token : token + 1]
        gate, up = (linear(row, matrix(gate_up, part * EXPERTS + expert)) for part in (0, 1))
        h = functional.silu(gate) * up
        y[token] += weights[token, slot] * linear(h, matrix(down, expert))[0]
    return y


def expert_by_expert(
    x: Tensor, gate_up: ExpertStack, down: ExpertStack, chosen: Tensor, weights: Tensor
) -> Tensor:
    """As in `requant.models.experts`, with its device query."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    found = []
    for expert, own in enumerate(x[order // PER_TOKEN].split(counts)):
        if len(own):
            gate, up = (linear(own, matrix(gate_up, part * EXPERTS + expert)) for part in (0, 1))
            found.append(linear(functional.silu(gate) * up, matrix(down, expert)))
    y = torch.cat(found)[order.argsort()].view(*chosen.shape, -1)
    return (y * weights.unsqueeze(-1)).sum(1)


def grouped(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """As in `transformers.integrations.moe.grouped_mm_experts_forward`."""
    experts, order = chosen.flatten().sort()
    counts = torch.histc(experts.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = functional.grouped_mm(x[order // PER_TOKEN], gate_up.mT, offs=ends).chunk(2, -1)
    y = functional.grouped_mm(functional.silu(gate) * up, down.mT, offs=ends)
    y = (y * weights.flatten()[order, None])[order.argsort()]
    return y.view(*chosen.shape, -1).sum(1)


def known_to_the_host(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Sequence[int], weights: Tensor
) -> Tensor:
    """One token."""
    found = []
    for expert in chosen:
        gate, up = functional.linear(x, gate_up[expert]).chunk(2, -1)
        found.append(functional.linear(functional.silu(gate) * up, down[expert]))
    return weights @ torch.cat(found)


def choices(tokens: int) -> list[Tensor]:
    """Chosen experts for enough calls to use all experts twice; consecutive calls share none as long as possible."""
    order = torch.cat([torch.randperm(EXPERTS) for _ in range(2 * max(1, tokens * PER_TOKEN // EXPERTS + 1))])
    each = tokens * PER_TOKEN
    return [c.view(tokens, PER_TOKEN).cuda() for c in order[: len(order) // each * each].split(each)]


def best(*candidates: Sequence[Callable[[], object]]) -> Timing:
    return min((cold_time(calls) for calls in candidates for _ in range(2)), key=lambda found: found.median)


def eager_time(call: Callable[[], object], *, calls: int = 9) -> float:
    """Median microseconds of a call on an idle GPU, until the GPU has finished."""
    times = []
    for _ in range(calls + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return median(times[2:])


def prompts(tokens: Sequence[int]) -> list[dict[str, object]]:
    """Rows of `--prompts`."""
    rows: list[dict[str, object]] = []

    def record(name: str, bits: float, m: int, call: Callable[[], Tensor], want: Tensor, graph: bool) -> None:
        error = ((call().float() - want).norm() / want.norm()).item()
        row: dict[str, object] = {"kernel": name, "bits": bits, "m": m, "error": error}
        if error < GATE:
            row["us"] = eager_time(call)
            if graph:
                row["graph_us"] = cold_time([call] * 2, replays=5).median
        rows.append(row)
        print(row, flush=True)

    inputs = {}
    for m in tokens:
        chosen = torch.rand(m, EXPERTS).topk(PER_TOKEN, -1).indices.cuda()
        x = torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16)
        inputs[m] = x, chosen, torch.rand(m, PER_TOKEN, device="cuda", dtype=torch.bfloat16)
    for code, bits in PROMPT_CODES:
        gate_up, down = stack(code, bits, INTERMEDIATE, HIDDEN, 2), stack(code, bits, HIDDEN, INTERMEDIATE, 1)
        for m, (x, chosen, weights) in inputs.items():
            given = x, gate_up, down, chosen, weights
            rule = group_tokens(chosen.numel(), EXPERTS)
            calls: dict[str, Callable[[], Tensor]] = {
                f"grouped, {n} tokens a CTA" + " (the rule's)" * (n == rule): (
                    lambda given=given, n=n: experts_prefill(*given, tokens_per_cta=n)
                )
                for n in GROUP_TOKENS
            }
            if m <= 64:
                calls["the step"] = lambda given=given: experts_step(*given)
            alone = lambda given=given: expert_by_expert(*given)  # noqa: E731
            compile_ahead(lambda calls=calls, alone=alone: [call() for call in (*calls.values(), alone)])
            want = alone().float()
            for name, call in calls.items():
                record(f"{code}, {name}", bits, m, call, want, True)
            record(f"{code}, expert by expert", bits, m, alone, want, False)
        del gate_up, down
    wide, narrow = bf16_weights()
    for m, given in inputs.items():
        call = lambda x, c, w: grouped(x, wide, narrow, c, w)  # noqa: E731
        once = lambda given=given, call=call: call(*given)  # noqa: E731
        record("bf16 grouped_mm", 16, m, once, once().float(), True)
    return rows


def bf16_weights() -> tuple[Tensor, Tensor]:
    """Weights of all experts: gates and ups, and downs."""
    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    wide, narrow = (torch.randn(EXPERTS, n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for n, k in shapes)
    return wide, narrow


def write(out: Path, rows: list[dict[str, object]], method: str) -> None:
    about = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": f"{EXPERTS} experts, {PER_TOKEN} a token, hidden {HIDDEN}, intermediate {INTERMEDIATE}",
        "method": method,
    }
    out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", help="tokens of prompts, instead of steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.prompts:
        write(args.out, prompts(args.prompts), "medians: 9 calls on an idle GPU, 5 replays of a CUDA graph")
        return
    x = {m: torch.randn(m, HIDDEN, device="cuda", dtype=torch.bfloat16) for m in args.tokens}
    weights = {m: torch.rand(m, PER_TOKEN, device="cuda", dtype=torch.bfloat16) for m in args.tokens}
    calls_of = {m: choices(m) for m in args.tokens}
    rows: list[dict[str, object]] = []

    def record(name: str, bits: float, m: int, timing: Timing, error: float | None) -> None:
        rows.append({
            "kernel": name, "bits": bits, "m": m, "us": timing.median, "low": timing.low, "high": timing.high,
            "error": error,
        })  # fmt: skip
        print(rows[-1], flush=True)

    for code, bits in CODES:
        gate_up = stack(code, bits, INTERMEDIATE, HIDDEN, 2)
        down = stack(code, bits, HIDDEN, INTERMEDIATE, 1)
        for m in args.tokens:
            first = calls_of[m][0]
            want = one_by_one(x[m], gate_up, down, first, weights[m])
            error = (
                (experts_step(x[m], gate_up, down, first, weights[m]) - want).norm() / want.norm()
            ).item()
            if not error < GATE:
                print(f"{code} {bits} bits, {m} tokens: relative error {error:.1e}, not timed", flush=True)
                continue
            calls = [
                lambda c=c, m=m, a=gate_up, b=down: experts_step(x[m], a, b, c, weights[m])
                for c in calls_of[m]
            ]
            record(code, bits, m, best(calls), error)
        del gate_up, down
    wide, narrow = bf16_weights()
    for m in args.tokens:
        candidates: dict[str, list[Callable[[], object]]] = {
            "bf16 grouped_mm": [
                lambda c=c, m=m: grouped(x[m], wide, narrow, c, weights[m]) for c in calls_of[m]
            ]
        }
        if m == 1:
            hosts: list[list[int]] = [c.flatten().tolist() for c in calls_of[m]]
            candidates["bf16, known to the host"] = [
                lambda own=own: known_to_the_host(x[1], wide, narrow, own, weights[1]) for own in hosts
            ]
        for name, calls in candidates.items():
            record(name, 16, m, best(calls), None)
        base = min(row["us"] for row in rows if row["m"] == m and row["bits"] == 16)  # type: ignore[type-var]
        for row in rows:
            if row["m"] == m:
                row["ratio"] = base / row["us"]  # type: ignore[operator]
    write(args.out, rows, "CUDA graph, other experts in every call, the lower of two medians of 11")


if __name__ == "__main__":
    main()
