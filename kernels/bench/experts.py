"""The experts of one block of Qwen3-30B-A3B (128 experts, 8 per token, 2048 x 768) with random weights: ours and bf16.

    python kernels/bench/experts.py --out eval/results/experts-step-h200.json
    python kernels/bench/experts.py --prompts 64 512 4096 --out experts-prefill.json
    python kernels/bench/experts.py --launches 1 4 8 16 --out experts-launches.json

Timed: the replacement of `mlp.experts` in a step, from tokens, chosen experts and their weights to the sum, without the
router. bf16 is the faster of two: transformers' way (tokens sorted by expert, `grouped_mm`), which a graph can also capture,
and one product per expert, with experts that the host knew before the capture, as no server could. Every call chooses other
experts, so that none finds its weights in the L2 cache. A step that differs from its experts one by one is not timed.

With `--prompts`, the given numbers of tokens go through the layer: grouped (`experts/prefill.py`), with the rule's tokens
per CTA and with each other number; expert by expert, where the host asks how many tokens each has; up to 64 by the step; and
with bf16 `grouped_mm`. Times are per call on an idle GPU, Python included (`us`), and in a CUDA graph (`graph_us`) if
possible.

With `--launches`, gates and ups, and downs, of a step of the given numbers of tokens are timed on their own, with the
rule's launch (`trellis_slots`) and with every other one. Codes of several widths have as many matrices of each as a budget
gives them, about: a normal distribution around the mean.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import gauss, seed
from statistics import median
from typing import Any

import torch
from requant_kernels import linear
from requant_kernels.common.compile_ahead import compile_ahead
from requant_kernels.common.timing import Timing, cold_time
from requant_kernels.experts.gemv import experts_gemv
from requant_kernels.experts.prefill import experts_prefill
from requant_kernels.experts.stack import ExpertStack, stack_experts
from requant_kernels.experts.step import experts_step, input_form
from requant_kernels.random_layouts import random_layout
from requant_kernels.trellis.gemm_sm90_launch import GROUP_TOKENS, group_tokens
from requant_kernels.trellis.gemv import rotate_activations
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig
from torch import Tensor
from torch.nn import functional

EXPERTS, PER_TOKEN, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
AROUND_2 = tuple(quarters / 4 for quarters in range(4, 17))
AROUND_3 = tuple(quarters / 4 for quarters in range(8, 17))
PROMPT_CODES = (("mul1", (2,)), ("pair", (2,)), ("pair", AROUND_2))
CODES = (
    ("mul1", (2,)),
    ("pair", (2,)),
    ("pair", AROUND_2),
    ("mul1", (2.25,)),
    ("mul1", (3,)),
    ("mul1", (4,)),
)
LAUNCH_CODES = (("pair", AROUND_2), ("mul1", AROUND_3), ("pair", (2,)), ("mul1", (4,)))
LAUNCHES = tuple(
    (w, t, u) for w in (2, 4, 8) for t in (1, 2, 4) for u in (1, 2)
)  # warps, tiles, units a step
GATE = 2e-2  # relative Frobenius error against the experts one by one, bfloat16


def stack(code: str, widths: Sequence[float], n: int, k: int, parts: int) -> ExpertStack:
    """Random matrices of all experts, with the input scales of one seed."""
    signs = (torch.randint(0, 2, (k,), device="cuda") * 2 - 1).half()
    mean, least, most = 2 if widths[0] < 2 else 3, min(widths), max(widths)
    drawn = [min(most, max(least, round(4 * gauss(mean, 0.5)) / 4)) for _ in range(parts * EXPERTS)]
    layouts: list[Any] = [replace(random_layout(code, bits, n, k), input_scales=signs) for bits in drawn]
    return stack_experts(layouts, parts=parts, widths=widths)


def name_of(code: str, widths: Sequence[float]) -> str:
    return code if len(widths) == 1 else f"{code}, {len(widths)} widths"


def bits_of(stack: ExpertStack) -> float:
    """The mean."""
    return sum(bits for bits, _ in stack.index_of) / len(stack.index_of)


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
    x: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    chosen: Tensor,
    weights: Tensor,
    most: int | None = None,
) -> Tensor:
    """As in `requant.models.experts`, with its device query. `most`: tokens of an expert at once, 32 for products of which
    none rounds activations to int8."""
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    found = []
    for expert, own in enumerate(x[order // PER_TOKEN].split(counts)):
        for rows in own.split(most or len(own)) if len(own) else ():
            gate, up = (linear(rows, matrix(gate_up, part * EXPERTS + expert)) for part in (0, 1))
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
    for code, widths in PROMPT_CODES:
        gate_up, down = (
            stack(code, widths, INTERMEDIATE, HIDDEN, 2),
            stack(code, widths, HIDDEN, INTERMEDIATE, 1),
        )
        name, bits = name_of(code, widths), bits_of(gate_up)
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
            want = expert_by_expert(*given, most=32).float()
            for kind, call in calls.items():
                record(f"{name}, {kind}", bits, m, call, want, True)
            record(f"{name}, expert by expert", bits, m, alone, want, False)
        del gate_up, down
    wide, narrow = bf16_weights()
    for m, given in inputs.items():
        call = lambda x, c, w: grouped(x, wide, narrow, c, w)  # noqa: E731
        once = lambda given=given, call=call: call(*given)  # noqa: E731
        record("bf16 grouped_mm", 16, m, once, once().float(), True)
    return rows


def launches(tokens: Sequence[int]) -> list[dict[str, object]]:
    """Rows of `--launches`."""
    rows: list[dict[str, object]] = []
    others = [TrellisGemvConfig(num_warps=w, tiles_per_cta=t, units_per_step=u) for w, t, u in LAUNCHES]
    products = ("gates and ups", INTERMEDIATE, HIDDEN, 2), ("downs", HIDDEN, INTERMEDIATE, 1)
    for (code, widths), (product, n, k, parts), m in itertools.product(LAUNCH_CODES, products, tokens):
        own, per_token = stack(code, widths, n, k, parts), PER_TOKEN if parts == 2 else 1
        x = torch.randn(m * PER_TOKEN // per_token, k, device="cuda").half()
        rotated = rotate_activations(x, own.layout, input_form(own), asm=True)
        slots = [chosen.flatten() for chosen in choices(m)]

        def calls(
            config: TrellisGemvConfig | None, own=own, x=rotated, per_token=per_token, slots=slots
        ) -> list[Callable[[], Tensor]]:
            return [lambda s=s: experts_gemv(x, own, s, per_token=per_token, config=config) for s in slots]

        compile_ahead(lambda calls=calls: [calls(config)[0]() for config in (None, *others)])
        want = calls(None)[0]()
        for config in (None, *others):
            error = ((calls(config)[0]() - want).norm() / want.norm()).item()
            rows.append({
                "codes": name_of(code, widths), "bits": bits_of(own), "product": product, "m": m,
                "launch": "the rule" if config is None else asdict(config), "error": error,
                "us": cold_time(calls(config)).median,
            })  # fmt: skip
            print(rows[-1], flush=True)
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
    parser.add_argument(
        "--launches", type=int, nargs="+", help="tokens of steps, to time launches of their products"
    )
    args = parser.parse_args()
    torch.manual_seed(0)
    seed(0)
    if args.launches:
        write(args.out, launches(args.launches), "CUDA graph, other experts in every call, median of 11")
        return
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

    for code, widths in CODES:
        gate_up = stack(code, widths, INTERMEDIATE, HIDDEN, 2)
        down = stack(code, widths, HIDDEN, INTERMEDIATE, 1)
        name, bits = name_of(code, widths), bits_of(gate_up)
        for m in args.tokens:
            first = calls_of[m][0]
            want = one_by_one(x[m], gate_up, down, first, weights[m])
            error = (
                (experts_step(x[m], gate_up, down, first, weights[m]) - want).norm() / want.norm()
            ).item()
            if not error < GATE:
                print(f"{name} {bits} bits, {m} tokens: relative error {error:.1e}, not timed", flush=True)
                continue
            calls = [
                lambda c=c, m=m, a=gate_up, b=down: experts_step(x[m], a, b, c, weights[m])
                for c in calls_of[m]
            ]
            record(name, bits, m, best(calls), error)
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
