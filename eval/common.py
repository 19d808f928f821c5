"""What all studies share: a model with its texts, one protocol for quality, bits that count everything, a results file.

The protocol is that of `../shared/reference/quality-peers.md`: calibration on 128 windows of 1024 tokens of
`wikitext-like.raw`, perplexity over all 318 windows of 1024 tokens of the WikiText-2 raw test text, KL to the original over
the first 40 of them, everything in float32. The last quarter of `c4-sample.txt` is a second domain, never used for choices.
"""

import copy
import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

import requant
from eval.markdown import ROOT
from requant.calibration.stats import LinearStats
from requant.checkpoint.sizes import matrix_parts
from requant.errors import TextError
from requant.evaluation.perplexity import Protocol, perplexity_and_kl
from requant.formats.quantized_weight import spec_of
from requant.inference.own_text import own_windows
from requant.pipeline.preparation.prepare import Prepared, prepare, start
from requant.quantizers.registry import find_method
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import to_dict
from requant.run.context import RunContext, Weights
from requant.run.workspace import Workspace
from requant.text.sources import Text, read_text
from requant.text.windows import token_windows

MODEL = ROOT.parent / "shared" / "models" / "bench-32m"
DATA = ROOT.parent / "shared" / "data"
CALIBRATION, TEST, SECOND = "wikitext-like.raw", "wiki.test.raw", "c4-sample.txt"
KL_WINDOWS = 40
SECOND_SHARE = 4  # the last 1/4 of the second text is scored
BATCH = 8  # windows per forward pass; 8 x 1024 x 16384 float32 logits are half a GiB


@dataclass(frozen=True, kw_only=True)
class Study:
    """A model, its texts, and the context from which the run of every row is derived."""

    prepared: Prepared
    reference: PreTrainedModel
    second: Text
    second_windows: Int64[Tensor, "s t"]
    base: RunContext
    statistics: dict[frozenset[str], dict[str, LinearStats]] = field(default_factory=dict)
    written: dict[int, Int64[Tensor, "c t"]] = field(default_factory=dict)

    def own_text(self, count: int, *, of: Int64[Tensor, "b t"]) -> Int64[Tensor, "c t"]:
        """`count` windows that the original writes, each continuing the beginning of a window in `of`; rows share them."""
        if count not in self.written:
            self.written[count] = own_windows(self.reference, of, count)
        return self.written[count]

    def run(self, method: str, *, options: Mapping[str, Any], **changes: Any) -> RunContext:
        """A run of `method` with these quantizer options; rows share the statistics of the original model."""
        chosen = find_method(method)
        recipe = dataclasses.replace(
            self.base.recipe, method=method, quantizer=chosen.config(**options), **changes
        )
        shared = self.statistics.setdefault(chosen.needs, {})
        return dataclasses.replace(
            self.base,
            recipe=recipe,
            statistics=shared,
            curvature={},
            seconds={},
            finetuned_params={},
            flip_rates=[],
        )


def open_study(
    model: Path,
    data: Path,
    *,
    num_samples: int,
    seq_len: int,
    windows: int | None,
    device: str,
    finetune: Finetune | None = None,
) -> Study:
    """Load everything once. `windows` None scores the whole test text; `finetune` says how much text training may use."""
    recipe = Recipe(
        model=str(model),
        calibration=Calibration(text=(find(data, CALIBRATION),), num_samples=num_samples, seq_len=seq_len),
        evaluation=Evaluation(text=(find(data, TEST),), context=seq_len, windows=windows or 10**6),
        finetune=finetune or Finetune(),
    )
    prepared = prepare(recipe.model, recipe, device=device, dtype="float32")
    named = dataclasses.replace(  # for the results: names instead of folders
        recipe,
        model=model.name,
        calibration=dataclasses.replace(recipe.calibration, text=(CALIBRATION,)),
        evaluation=dataclasses.replace(recipe.evaluation, text=(TEST,), windows=len(prepared.eval_windows)),
    )
    second = read_text(find(data, SECOND))
    rest = token_windows(second, prepared.tokenizer, num_samples=None, seq_len=seq_len)
    return Study(
        prepared=prepared,
        reference=copy.deepcopy(prepared.model),
        second=second,
        second_windows=rest[-(len(rest) // SECOND_SHARE) :][:windows],
        base=start(prepared, named, workspace=Workspace(None), quiet=True),
    )


def find(folder: Path, name: str) -> str:
    """The path of the file with this name in a folder or below it. Raises TextError if there is none."""
    found = sorted(folder.rglob(name))
    if not found:
        raise TextError(f"{folder} holds no {name}; give --data a folder with the texts of the protocol.")
    return str(found[0])


def quality(study: Study, run: RunContext, weights: Weights, *, second: bool = False) -> dict[str, Any]:
    """Perplexity on the whole test text and KL on its first windows; with `second`, both on the second domain too."""
    prepared = study.prepared
    run.path(weights).apply_weights(1.0 if weights else 0.0)
    whole = perplexity_and_kl(
        prepared.model, prepared.eval_windows, text=prepared.evaluation, batch_size=BATCH
    )
    near = against_original(study, prepared.eval_windows[:KL_WINDOWS], prepared.evaluation)
    found = {"perplexity": whole.perplexity, "perplexity_first": near["perplexity"]}
    found |= {key: near[key] for key in ("kl", "p99_kl", "top1")}
    if second:
        found["second"] = against_original(study, study.second_windows, study.second)
    return found


def against_original(study: Study, windows: Int64[Tensor, "s t"], text: Text) -> dict[str, Any]:
    """Perplexity of the model in its current state, and its KL to the original, on these windows."""
    found = perplexity_and_kl(
        study.prepared.model, windows, text=text, reference=study.reference, batch_size=BATCH
    )
    return {
        "perplexity": found.perplexity,
        "original_perplexity": found.reference_perplexity,
        "kl": found.mean_kl,
        "p99_kl": found.p99_kl,
        "top1": found.top1_agreement,
    }


def bits_per_weight(weights: Weights) -> dict[str, Any]:
    """Everything a checkpoint stores for the matrices, in bits per weight; also by part, and the sparse fraction."""
    parts: dict[str, int] = {}
    count = entries = 0
    for weight in weights.values():
        spec = spec_of(weight)
        count += spec.shape[0] * spec.shape[1]
        entries += spec.num_entries
        for part, size in matrix_parts(spec).items():
            parts[part] = parts.get(part, 0) + size
    return {
        "bits_per_weight": 8 * sum(parts.values()) / count,
        "bits_by_part": {part: 8 * size / count for part, size in parts.items() if size},
        "sparse_fraction": entries / count,
    }


def row_of(label: str, run: RunContext, started: float, **values: Any) -> dict[str, Any]:
    """One row of results: what was run, what was measured, how long each stage took."""
    return {
        "label": label,
        **values,
        "seconds": {name: round(value, 3) for name, value in run.seconds.items()},
        "wall_seconds": round(time.perf_counter() - started, 3),
        "recipe": to_dict(run.recipe),
    }


def header(study: Study) -> dict[str, Any]:
    """Where the numbers come from: code, machine, model, texts."""
    prepared = study.prepared

    def of(text: Text, windows: Tensor, share: str) -> dict[str, Any]:
        protocol = Protocol(
            text=text.name,
            sha256=text.sha256,
            context=windows.shape[1],
            windows=len(windows),
            tokens=len(windows) * (windows.shape[1] - 1),
        )
        return {**dataclasses.asdict(protocol), "share": share}

    return {
        **environment(prepared.model.device),
        "model": {"name": study.base.recipe.model, "fingerprint": study.base.fingerprint[:16]},
        "protocol": {
            "calibration": of(prepared.calibration, prepared.windows, "spread evenly"),
            "perplexity": of(prepared.evaluation, prepared.eval_windows, "all whole windows"),
            "kl": of(prepared.evaluation, prepared.eval_windows[:KL_WINDOWS], "the first windows"),
            "second": of(study.second, study.second_windows, f"the last 1/{SECOND_SHARE}"),
        },
    }


def environment(device: torch.device) -> dict[str, Any]:
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    return {
        "requant": requant.__version__,
        "commit": _commit(),
        "sources": sources_hash(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def sources_hash() -> str:
    """SHA-256 over the package's Python files, which identifies the code that ran if there is no git."""
    state = hashlib.sha256()
    for file in sorted((ROOT / "requant").rglob("*.py")):
        state.update(str(file.relative_to(ROOT)).encode() + file.read_bytes())
    return state.hexdigest()


def _commit() -> str | None:
    """The commit that is checked out; None in a copy without git history."""
    if shutil.which("git") is None:
        return None
    shown = subprocess.run(["git", "rev-parse", "--verify", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return shown.stdout.strip() or None


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    """Write to a second file and rename it, so that an interrupted study keeps the rows it finished."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_suffix(".writing")
    aside.write_text(json.dumps(rounded(data), indent=1) + "\n", encoding="utf-8")
    os.replace(aside, file)


def rounded(value: Any) -> Any:
    """Round floats to six significant digits: enough for every table, and easy to compare."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value
