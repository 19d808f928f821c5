"""What finished stages leave in the workspace for a run that resumes: single matrices, and whole outcomes of a stage."""

from requant.formats.containers import QuantizedWeight
from requant.formats.packed_spec import MatrixLayout
from requant.formats.packing import pack, unpack
from requant.models.targets import LinearSite
from requant.run.context import Run, Weights, recipe_part
from requant.run.workspace import digest


def stored_weight(run: Run, stage: str, key: str, site: LinearSite) -> QuantizedWeight | None:
    """A matrix that a finished stage left, on the model's device."""
    stored = run.workspace.get(stage, key)
    if stored is None:
        return None
    layout = MatrixLayout.from_json(site.name, stored.value)
    return unpack(layout, stored.tensors).to(site.parameter.device)


def store_weight(run: Run, stage: str, key: str, weight: QuantizedWeight) -> None:
    """Keep a matrix for a run that resumes."""
    if run.workspace.folder is not None:
        layout, tensors = pack(weight)
        run.workspace.put(stage, key, tensors=tensors, value=layout.to_json())


def kept_outcome(run: Run, stage: str) -> Weights | None:
    """All matrices, and into `run.others` what learned beside them, if a finished stage left them."""
    keys = _outcome_keys(run, stage)
    beside = run.workspace.get("others", keys[""])
    found = {site.name: stored_weight(run, stage, keys[site.name], site) for site in run.sites}
    weights = {name: weight for name, weight in found.items() if weight is not None}
    if beside is None or len(weights) < len(found):
        return None
    for name in beside.value:
        run.others[name] = (beside.tensors[f"{name}.start"], beside.tensors[f"{name}.end"])
    return weights


def keep_outcome(run: Run, stage: str, weights: Weights) -> None:
    """Keep the outcome of a stage for a run that resumes."""
    keys = _outcome_keys(run, stage)
    for name, weight in weights.items():
        store_weight(run, stage, keys[name], weight)
    ends = {
        f"{name}.{end}": pair[i]
        for name, pair in run.others.items()
        for i, end in enumerate(("start", "end"))
    }
    run.workspace.put("others", keys[""], tensors=ends, value=list(run.others))


def _outcome_keys(run: Run, stage: str) -> dict[str, str]:
    """A key a matrix, and one for all else under the empty name."""
    sections = (
        "mode",
        "calibration",
        "method",
        "quantizer",
        "sensitivity",
        "detach",
        "tuning",
        "budget",
        "seed",
    )
    base = digest(run.fingerprint, recipe_part(run.recipe, *sections), run.training_windows, stage)
    return {name: digest(base, name) for name in ("", *(s.name for s in run.sites))}
