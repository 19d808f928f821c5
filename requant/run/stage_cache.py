"""What finished stages save in the workspace for a run that resumes: single matrices, and all weights of a stage.

A stage that finetunes also changes parameters without codes (norms, biases, embeddings); those are saved with it.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from requant import ranks
from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, pack, unpack
from requant.run.context import RunContext, Weights, recipe_sections
from requant.run.workspace import digest

TRAINING = "training"  # the state inside a stage that trains (`finetune/saved_training.py`)


def load_weight(
    run: RunContext, stage: str, key: str, name: str, device: torch.device
) -> QuantizedWeight | None:
    """A matrix that a finished stage left; None where it left none."""
    stored = run.workspace.get(stage, key)
    if stored is None:
        return None
    spec = PackedSpec.from_json(name, stored.value)
    return unpack(spec, stored.tensors, device=device)


def load_weights(
    run: RunContext, stage: str, keys: Mapping[str, str], devices: Mapping[str, torch.device]
) -> Weights:
    """The codes that a finished stage left of these matrices, on their devices; others are missing."""
    found = {name: load_weight(run, stage, keys[name], name, device) for name, device in devices.items()}
    return {name: weight for name, weight in found.items() if weight is not None}


def save_weight(run: RunContext, stage: str, key: str, weight: QuantizedWeight, *, rank: int = 0) -> None:
    """Keep a matrix, which `rank` made or all ranks alike, for a run that resumes."""
    if run.workspace.folder is not None and rank == ranks.rank():
        spec, tensors = pack(weight)
        run.workspace.put(stage, key, tensors=tensors, value=spec.to_json(), rank=rank)


def load_stage(run: RunContext, stage: str, tables: Mapping[str, Tensor] | None = None) -> Weights | None:
    """The weights of a finished stage, None where it did not finish; its finetuned parameters go into the run.

    The run's model is at the originals. `tables`: name -> parameter of embedding and head, where the stage has them beside
    the matrices.
    """
    devices = {target.name: target.codes_device for target in run.targets}
    devices |= {name: parameter.device for name, parameter in (tables or {}).items()}
    keys = _stage_keys(run, stage, devices)
    finetuned = run.workspace.get("finetuned-params", keys[""])
    weights = load_weights(run, stage, keys, devices)
    if finetuned is None or len(weights) < len(devices):
        return None
    for name in finetuned.value:
        original = run.original_param(name, run.model.get_parameter(name))
        run.finetuned_params[name] = (original, finetuned.tensors[f"{name}.end"])
    return weights


def save_stage(run: RunContext, stage: str, weights: Weights) -> None:
    """Keep the weights of a stage, and the run's finetuned parameters, for a run that resumes.

    The state of its training is needed no more.
    """
    keys = _stage_keys(run, stage, weights)
    for name, weight in weights.items():
        save_weight(run, stage, keys[name], weight)
    tensors = {f"{name}.end": finetuned for name, (_, finetuned) in run.finetuned_params.items()}
    run.workspace.put("finetuned-params", keys[""], tensors=tensors, value=list(run.finetuned_params))
    run.workspace.discard(TRAINING, training_key(run, stage))


def stage_key(run: RunContext, stage: str) -> str:
    """The key of a stage's result as a whole."""
    sections = (
        "mode",
        "calibration",
        "method",
        "quantizer",
        "sensitivity",
        "detach",
        "finetune",
        "recovery",
        "budget",
        "seed",
    )
    return digest(run.fingerprint, recipe_sections(run.recipe, *sections), run.train_windows, stage)


def training_key(run: RunContext, stage: str) -> str:
    """The key of the state inside a stage that trains."""
    return digest(stage_key(run, stage), TRAINING)


def _stage_keys(run: RunContext, stage: str, names: Iterable[str]) -> dict[str, str]:
    """Matrix -> its key, and under the empty name the key of the finetuned parameters."""
    base = stage_key(run, stage)
    return {name: digest(base, name) for name in ("", *names)}
