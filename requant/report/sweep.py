"""`requant sweep`: one model at several budgets, each quantized and measured, with the statistics collected once.

Writes a folder with a checkpoint per budget (`2.5bit/`, as `requant quantize` writes it), `index.html` with the measured
curve of KL against size, and `sweep.json` with its numbers. `resume` keeps a checkpoint that an interrupted sweep finished
if its recipe is the requested one.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from requant import progress
from requant.calibration.stats import LinearStats
from requant.checkpoint.new_folder import check_output
from requant.display import format_bytes
from requant.errors import ModelError, OutputError
from requant.files import path_of
from requant.models.devices import pick_device
from requant.pipeline.preparation.outline import outline
from requant.pipeline.quantize import quantize
from requant.recipe.options import budget_name, output_folder, recipe_from_options
from requant.recipe.python_call import check_no_recipe
from requant.recipe.schema import Recipe
from requant.recipe.sizes import parse_budgets
from requant.recipe.yaml_files import dump_recipe
from requant.report.compare import Entry, compare_checkpoints, render_comparison
from requant.report.save import save
from requant.report.verdicts import is_damaged
from requant.run.ownership import FILE, claim
from requant.run.workspace import SAVE_EVERY, Workspace


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The checkpoints by rising size, and what their numbers say."""

    entries: Sequence[Entry]
    answer: str
    page: Path

    def to_dict(self) -> dict[str, Any]:
        return {
            "answer": self.answer,
            "page": str(self.page),
            "checkpoints": [entry.to_dict() for entry in self.entries],
        }


def sweep(
    model: str | Path | None,
    bits: Sequence[int | float | str],
    output: str | Path | None = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    arguments: Sequence[str] | None = None,
    quiet: bool = True,
    **options: Any,
) -> Sweep:
    """Quantize `model` at each of `bits` into the folder `output` (None: ./MODEL-METHOD-sweep), and compare the results.

    `model` is a source (folder, hub name, alias, `demo`); None: the recipe's, or `demo`. Recipe and options are those of
    `requant.quantize`; `save_every` and `arguments` are those of `Workspace`. All recipes are checked before the first run.
    Raises RequantError.
    """
    model = str(model) if isinstance(model, Path) else model
    check_no_recipe(model)
    if not isinstance(model, str | None):
        raise ModelError(
            f"a sweep reads the model anew for every budget, so it takes a text, not {type(model).__name__}; "
            "give a folder, a name or an alias."
        )
    where = pick_device(device)
    recipes = _recipes(model, bits, recipe, options, gpu=where.startswith("cuda"))
    by_default = sweep_folder(next(iter(recipes.values())))
    folder = path_of(by_default if output is None else output, "output")
    finished: set[str] = set()
    if resume and folder.is_dir():
        finished = {name for name, each in recipes.items() if _finished(folder / name, each, where)}
    else:
        _check_new(folder)
    statistics: dict[str, LinearStats] = {}
    with progress.display(shown=not quiet):
        for index, (name, each) in enumerate(recipes.items()):
            if name in finished:
                Workspace(folder / f"{name}.partial").remove_leftover()
                continue
            progress.begin(f"{name} ({index + 1} of {len(recipes)}), ", runs_left=len(recipes) - index - 1)
            workspace = Workspace(
                folder / f"{name}.partial", resume=resume, save_every=save_every, arguments=arguments
            )
            result = quantize(
                each.model,
                each,
                device=device,
                dtype=dtype,
                workspace=workspace,
                statistics=statistics,
                quiet=quiet,
            )
            workspace.check()
            save(result, folder / name, resumable=True)
            claim(folder, arguments)  # for `--resume OUTPUT` between two checkpoints
            workspace.remove()
            del result
    return _compared(folder, [*recipes])


def _recipes(
    model: str | None,
    bits: Sequence[int | float | str],
    recipe: Recipe | Mapping[str, Any] | str | Path | None,
    options: Mapping[str, Any],
    *,
    gpu: bool,
) -> dict[str, Recipe]:
    """The name of a checkpoint -> its recipe. Raises RecipeError unless there are two or more different budgets."""
    recipes = [
        recipe_from_options(recipe, model=model, gpu=gpu, **{**options, "bits": each})
        for each in parse_budgets(bits)
    ]
    return {budget_name(each): each for each in recipes}


def _check_new(folder: Path) -> None:
    """Raise OutputError unless a sweep can begin there: another's leftovers may be all that a living run has."""
    if (folder / FILE).exists() or any(folder.glob("*.partial")):
        raise OutputError(
            f"{folder} holds a sweep that is not finished; --resume goes on with it, or choose another --output."
        )
    check_output(folder)


def _compared(folder: Path, names: Sequence[str]) -> Sweep:
    """The finished sweep, with its page and its numbers written."""
    entries = sorted(
        compare_checkpoints([str(folder / name) for name in names]), key=lambda entry: entry.bytes
    )
    found = Sweep(entries=entries, answer=answer(entries), page=folder / "index.html")
    found.page.write_text(render_comparison(entries, answer=found.answer), encoding="utf-8")
    (folder / "sweep.json").write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
    (folder / FILE).unlink(missing_ok=True)
    return found


def sweep_folder(recipe: Recipe) -> str:
    """MODEL-METHOD-sweep."""
    return output_folder(recipe).name.removesuffix(budget_name(recipe)) + "sweep"


def answer(entries: Sequence[Entry]) -> str:
    """Which budget to take, from what was measured; entries by rising size."""
    parts, last = [], None
    for entry in entries:
        name, kl, agreement = Path(entry.name).name, entry.mean_kl, entry.top1_agreement
        if kl is None or agreement is None:
            continue
        size = format_bytes(entry.bytes)
        if is_damaged(kl, agreement):
            parts.append(f"{name} is damaged ({size}, KL {kl:.2f}, {agreement:.0%} of the top tokens).")
        elif last is None:
            parts.append(
                f"{name} is the smallest that is not damaged: {size}, KL {kl:.3f}, {agreement:.0%} of the top tokens."
            )
            last = entry
        else:
            assert last.mean_kl is not None
            more = format_bytes(entry.bytes - last.bytes)
            # codes may hold all weights exactly, such as those of a ternary model
            has = (
                f"{kl / last.mean_kl:.2f} times its KL ({kl:.3f})"
                if last.mean_kl > 0
                else f"a KL of {kl:.3f}"
            )
            parts.append(f"{name} takes {more} more and has {has}.")
            last = entry
    if last is None:
        parts.append("None of them is worth using: give more --bits, --mode best or --finetune-steps.")
    return " ".join(parts)


def _finished(folder: Path, recipe: Recipe, device: str) -> bool:
    """Whether the checkpoint is there. Raises OutputError where it is of another recipe.

    The recipe that it names is as the model limits and completes it: its text fits, its steps are numbers. Only its weights
    may have told that it is not trained block by block.
    """
    file = folder / "recipe.yaml"
    if not folder.exists():
        return False
    completed = outline(recipe.model, recipe, device=device).recipe
    whole = dataclasses.replace(completed, finetune=dataclasses.replace(completed.finetune, blockwise=False))
    if file.is_file() and file.read_text(encoding="utf-8") in map(dump_recipe, (completed, whole)):
        return True
    raise OutputError(f"{folder} was made by another recipe; remove it, or choose another --output.")
