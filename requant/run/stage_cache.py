"""What finished stages leave in the workspace for a run that resumes: single matrices, and whole outcomes of a stage."""

from requant.formats.containers import QuantizedWeight
from requant.formats.packed_spec import PackedSpec
from requant.formats.packing import pack, unpack
from requant.models.targets import QuantTarget
from requant.run.context import RunContext, Weights, recipe_sections
from requant.run.workspace import digest


def load_weight(run: RunContext, stage: str, key: str, target: QuantTarget) -> QuantizedWeight | None:
    """A matrix that a finished stage left, on the model's device."""
    stored = run.workspace.get(stage, key)
    if stored is None:
        return None
    layout = PackedSpec.from_json(target.name, stored.value)
    return unpack(layout, stored.tensors).to(target.parameter.device)


def save_weight(run: RunContext, stage: str, key: str, weight: QuantizedWeight) -> None:
    """Keep a matrix for a run that resumes."""
    if run.workspace.folder is not None:
        layout, tensors = pack(weight)
        run.workspace.put(stage, key, tensors=tensors, value=layout.to_json())


def load_stage(run: RunContext, stage: str) -> Weights | None:
    """All matrices, and into `run.others` what learned beside them, if a finished stage left them."""
    keys = _outcome_keys(run, stage)
    beside = run.workspace.get("others", keys[""])
    found = {target.name: load_weight(run, stage, keys[target.name], target) for target in run.targets}
    weights = {name: weight for name, weight in found.items() if weight is not None}
    if beside is None or len(weights) < len(found):
        return None
    for name in beside.value:
        run.finetuned_params[name] = (beside.tensors[f"{name}.start"], beside.tensors[f"{name}.end"])
    return weights


def save_stage(run: RunContext, stage: str, weights: Weights) -> None:
    """Keep the outcome of a stage for a run that resumes."""
    keys = _outcome_keys(run, stage)
    for name, weight in weights.items():
        save_weight(run, stage, keys[name], weight)
    ends = {
        f"{name}.{end}": pair[i]
        for name, pair in run.finetuned_params.items()
        for i, end in enumerate(("start", "end"))
    }
    run.workspace.put("others", keys[""], tensors=ends, value=list(run.finetuned_params))


def _outcome_keys(run: RunContext, stage: str) -> dict[str, str]:
    """A key a matrix, and one for all else under the empty name."""
    sections = (
        "mode",
        "calibration",
        "method",
        "quantizer",
        "sensitivity",
        "detach",
        "finetune",
        "budget",
        "seed",
    )
    base = digest(run.fingerprint, recipe_sections(run.recipe, *sections), run.training_windows, stage)
    return {name: digest(base, name) for name in ("", *(s.name for s in run.targets))}
