"""Tokens per second in prefill and in decoding, and memory, by batch size.

    prefill   tokens of all prompts / seconds of the forward pass that reads them
    decode    sequences x new tokens / seconds of their steps (`inference/decode.py`; on a GPU replays of a CUDA graph)

Prompts are random tokens of equal length; decoding is greedy and ignores end-of-text tokens. The first round is a warm-up;
the median of the others is reported. A quantized model and its original are measured by the same code.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from requant.display import format_bytes, format_table
from requant.errors import InputError
from requant.inference import prompt_graphs
from requant.inference.convert import tune_kernels
from requant.inference.decode import Decoder, compiled_step
from requant.inference.load import open_served
from requant.models.devices import on_its_gpu, peak_memory, pick_device
from requant.models.loading import context_limit, load_config, resolve_source

ROUNDS = 3
SETTLING = 3  # prompts behind the first until all are read alike: one that is compared, one as it is, one that is captured
# batches, prompt tokens, new tokens
ON_CPU = ((1,), 64, 16)  # seconds of work
ON_GPU = ((1, 8, 64), 512, 128)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One model at one batch size."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ms_per_step: float
    model_bytes: int  # parameters and buffers
    peak_bytes: int  # on a GPU what torch allocated, with the memory of prompts' graphs, else the process's largest size
    graph: bool  # whether a step was a replay of a CUDA graph
    fused: bool  # whether its small operations were fused
    fused_rotations: bool  # and with them the rotations of trellis codes
    prompt_graph: bool  # whether prompts were replays too

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    name: str,
    model: Any,
    *,
    batch: int,
    prompt_tokens: int,
    new_tokens: int,
    compiled: bool = False,
    rounds: int = ROUNDS,
    kernel_attention: bool = True,
    fused: bool = True,
    fuses_rotations: bool = True,
    graphs_prompts: bool = prompt_graphs.BY_DEFAULT,
) -> Speed:
    """Time `rounds` rounds of prefill and decoding steps after one of warm-up; `compiled` runs steps under torch.compile.

    `kernel_attention`, `fused`, `fuses_rotations`, `graphs_prompts`: see `Decoder`.
    """
    device = torch.device(model.device)
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    prompts = torch.randint(vocabulary, (batch, prompt_tokens), generator=generator).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step_model = compiled_step(model) if compiled else None
    decoder = Decoder(
        model,
        length=prompt_tokens + new_tokens,
        step_model=step_model,
        kernel_attention=kernel_attention,
        fused=fused,
        fuses_rotations=fuses_rotations,
        graphs_prompts=graphs_prompts,
    )
    prefill, decode = [], []
    for count in range(rounds + 1):
        for _ in range(SETTLING if count == 1 and decoder.fuses_prompts else 0):
            decoder.reset()
            decoder.prefill(prompts)
        decoder.reset()
        prefill.append(timed(lambda: decoder.prefill(prompts), device))
        decoder.step()  # the first one captures
        decode.append(timed(lambda: [decoder.step() for _ in range(new_tokens - 1)], device))
    step = median(decode[1:]) / max(1, new_tokens - 1)
    graphs = decoder.prompt_graphs
    return Speed(
        name=name,
        batch=batch,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens_per_s=batch * prompt_tokens / median(prefill[1:]),
        decode_tokens_per_s=batch / step,
        ms_per_step=1e3 * step,
        model_bytes=model_bytes(model),
        peak_bytes=peak_memory(device) + (0 if graphs is None else graphs.bytes),
        graph=decoder.captured is not None,
        fused=decoder.fused is not None,
        fused_rotations=decoder.fused is not None and decoder.fused.fuses_rotations,
        prompt_graph=graphs is not None and bool(graphs.graphs),
    )


def model_bytes(model: Any) -> int:
    """Bytes of parameters and buffers, those that are shared once."""
    tensors = {t.data_ptr(): t for t in (*model.parameters(), *model.buffers()) if t.numel()}
    return sum(t.numel() * t.element_size() for t in tensors.values())


@on_its_gpu
def bench(
    checkpoint: str,
    *,
    reference: str | None = None,
    batches: Sequence[int] | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    compiled: bool = False,
    autotune: bool = False,
) -> list[Speed]:
    """One row a model and batch size; None takes what suits the device. Raises RequantError."""
    where = pick_device(device)
    if autotune and where == "cpu":
        raise InputError("--autotune measures the kernels of a GPU, and this run is on cpu; leave it out.")
    usual = ON_CPU if where == "cpu" else ON_GPU
    batches = batches or usual[0]
    prompt_tokens, new_tokens = prompt_tokens or usual[1], new_tokens or usual[2]
    if new_tokens < 2:
        raise InputError(f"--new-tokens {new_tokens} leaves nothing to time; give 2 or more.")
    names = [checkpoint] if reference is None else [checkpoint, reference]
    folders = [resolve_source(name) for name in names]
    for name, folder in zip(names, folders, strict=True):
        limit = context_limit(load_config(folder))
        if limit is not None and prompt_tokens + new_tokens > limit:
            raise InputError(
                f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} exceed the {limit} positions of "
                f"{name}; give less."
            )
    rows = []
    for name, folder in zip(names, folders, strict=True):
        model: Any = open_served(folder, device=where, dtype=dtype)
        if autotune:
            tune_kernels(model, tokens=sorted({min(batch, 64) for batch in batches}))
        for batch in batches:
            rows.append(
                measure(
                    name,
                    model,
                    batch=batch,
                    prompt_tokens=prompt_tokens,
                    new_tokens=new_tokens,
                    compiled=compiled,
                )
            )
        del model
        gc.collect()
        if where != "cpu":
            torch.cuda.empty_cache()
    return rows


def speed_table(rows: Sequence[Speed], *, compared: bool = False) -> str:
    """The rows as text; `compared`: their second half is the reference, and a column has the speedup of decoding."""
    base = {row.batch: row for row in rows[len(rows) // 2 :]} if compared else {}
    lines = []
    for row in rows:
        line = {
            "model": row.name,
            "batch": row.batch,
            "decode tokens/s": round(row.decode_tokens_per_s, 1),
            "ms/step": round(row.ms_per_step, 3),
            "prefill tokens/s": round(row.prefill_tokens_per_s, 1),
            "weights": format_bytes(row.model_bytes),
            "peak memory": format_bytes(row.peak_bytes),
        }
        if base:
            line["speedup"] = round(row.decode_tokens_per_s / base[row.batch].decode_tokens_per_s, 2)
        lines.append(line)
    return format_table(lines)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Wall seconds of `call`, with the device synchronized before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
