"""Accuracy on lm-eval's tasks for the original and checkpoints in one table, with standard errors.

The models answer the same questions, so the error of a difference is that of the mean of d_i = a_i - b_i over documents i.
It is smaller than the two models' own errors suggest if they mostly agree.

lm-eval prompts, scores and averages; requant provides the models. Six tasks can also be read from files, for machines
without a network: one line of JSON per document, prepared as lm-eval prepares it.

| task | columns of FOLDER/TASK.jsonl |
| --- | --- |
| `arc_easy`, `arc_challenge`, `piqa`, `hellaswag` | `query`, `choices`, `gold` (an index) |
| `winogrande` | `context_options`, `continuation`, `gold` |
| `lambada_openai` | `text` |

A file becomes a task that includes lm-eval's own definition and changes only where documents come from and the names of
their columns: prompt, request, metric and average remain lm-eval's (Gao et al., zenodo 10.5281/zenodo.12608602).
"""

# pyright: reportMissingImports=false
# (lm-eval is an extra)

import io
import json
import logging
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from requant.errors import (
    InputError,
    RequantError,
    TextError,
    class_and_first_line,
    did_you_mean,
    first_line,
    is_out_of_memory,
)
from requant.evaluation.lm_eval_package import MISSING
from requant.evaluation.perplexity import mean_difference
from requant.inference.load import open_model
from requant.models.devices import on_its_gpu, pick_device
from requant.models.loading import load_tokenizer, resolve_source

CHOICES = {"doc_to_text": "{{query}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
# task -> lm-eval's definition below its folder of tasks, and what the columns of our files change in it
LOCAL: dict[str, tuple[str, dict[str, Any]]] = {
    "lambada_openai": ("lambada/lambada_openai.yaml", {}),
    "piqa": ("piqa/piqa.yaml", {**CHOICES, "doc_to_decontamination_query": "query"}),
    "arc_easy": ("arc/arc_easy.yaml", {**CHOICES, "doc_to_decontamination_query": "query"}),
    "arc_challenge": ("arc/arc_challenge.yaml", {**CHOICES, "doc_to_decontamination_query": "query"}),
    "hellaswag": ("hellaswag/hellaswag.yaml", {**CHOICES, "process_docs": None}),
    "winogrande": (
        "winogrande/default.yaml",
        {
            "doc_to_text": "gold",
            "doc_to_choice": "{{context_options}}",
            "doc_to_target": "continuation",
            "doc_to_decontamination_query": "continuation",
        },
    ),
}
SUFFIX = "_from_file"
BATCH = 8
BOOTSTRAPS = 1000  # for the error of metrics that have no formula, such as a perplexity


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One metric of one task for one model.

    `difference`: to the first model, with its error paired by document; None for that model itself, and for metrics that
    are not means over documents.
    """

    model: str
    task: str
    metric: str
    value: float
    stderr: float | None
    documents: int
    difference: float | None = None
    difference_stderr: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@on_its_gpu
def evaluate_tasks(
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    data: str | Path | None = None,
    limit: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quiet: bool = True,
) -> list[TaskScore]:
    """Every metric of every task, model by model, with differences to the first; `limit` takes the first documents of each.

    `data` is a folder of files for the tasks in LOCAL; all others come from where lm-eval takes them. Raises
    InputError for an unknown task, TextError for a file that is missing or no such file, ModelError.
    """
    _check_installed()
    if not tasks:
        raise InputError("--tasks names no task; give lm-eval's names, separated by commas.")
    folders = [resolve_source(model) for model in models]
    where = pick_device(device)
    with _task_manager(tasks, None if data is None else Path(data)) as (manager, names):
        scores: list[TaskScore] = []
        first: dict[tuple[str, str], list[float]] = {}
        for index, (model, folder) in enumerate(zip(models, folders, strict=True)):
            opened = open_model(folder, device=where, dtype=dtype)
            results = _run(opened, load_tokenizer(folder), names, manager, limit=limit, quiet=quiet)
            found, by_document = _scores(model, results), _by_document(results)
            if index == 0:
                first = by_document
            else:
                found = [_with_difference(score, by_document, first) for score in found]
            scores += found
            del opened
    return scores


def score_rows(scores: Sequence[TaskScore]) -> list[dict[str, object]]:
    """The table: a line a metric of a task, a column a model, then the mean accuracy where tasks have one.

    Models after the first have their difference to it in brackets.
    """
    models = list(dict.fromkeys(score.model for score in scores))
    lines = list(dict.fromkeys((score.task, score.metric) for score in scores))
    found = {(score.task, score.metric, score.model): score for score in scores}
    rows: list[dict[str, object]] = []
    for task, metric in lines:
        cells: dict[str, object] = {m: _cell(found.get((task, metric, m))) for m in models}
        documents = max(s.documents for s in scores if (s.task, s.metric) == (task, metric))
        rows.append({"task": task, "metric": metric, **cells, "documents": documents})
    accuracies = [task for task, metric in lines if metric == "acc"]
    if len(accuracies) > 1:
        means: dict[str, object] = {
            model: _mean([found[task, "acc", model] for task in accuracies]) for model in models
        }
        rows.append({"task": "mean", "metric": "acc", **means, "documents": None})
    return rows


def _mean(scores: Sequence[TaskScore]) -> str:
    """The plain mean over tasks, and its error: documents of different tasks are independent."""
    mean = _mean_of([(score.value, score.stderr) for score in scores])
    difference = _mean_of([(score.difference, score.difference_stderr) for score in scores], sign="+")
    return f"{mean}{difference and f' ({difference})'}"


def _mean_of(found: Sequence[tuple[float | None, float | None]], sign: str = "") -> str:
    """Mean of values with errors, as text; nothing where a value is missing."""
    values, errors = ([x for x in column if x is not None] for column in zip(*found, strict=True))
    if len(values) < len(found):
        return ""
    mean = f"{sum(values) / len(values):{sign}.4f}"
    if len(errors) < len(found):
        return mean
    return f"{mean} ± {math.sqrt(sum(error**2 for error in errors)) / len(found):.4f}"


def _cell(score: TaskScore | None) -> str | None:
    if score is None:
        return None
    digits = 4 if abs(score.value) < 10 else 2
    error = "" if score.stderr is None else f" ± {score.stderr:.{digits}f}"
    beside = ""
    if score.difference is not None:
        beside = f" ({score.difference:+.{digits}f} ± {score.difference_stderr:.{digits}f})"
    return f"{score.value:.{digits}f}{error}{beside}"


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise InputError(MISSING) from error


@contextmanager
def _task_manager(tasks: Sequence[str], data: Path | None) -> Iterator[tuple[Any, list[str]]]:
    """lm-eval's catalogue with the local tasks in it, and the names to ask it for."""
    from lm_eval.tasks import TaskManager

    local = [] if data is None else [task for task in tasks if task in LOCAL]
    with tempfile.TemporaryDirectory() as folder:
        for task in local:
            assert data is not None
            definition = local_task(task, data, cache=folder)
            (Path(folder) / f"{task}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
        # lm-eval's own catalogue takes seconds to scan
        manager = TaskManager(include_path=folder, include_defaults=len(local) < len(tasks))
        for task in tasks:
            if task not in local and task not in manager.all_tasks:
                raise InputError(
                    f"lm-eval knows no task '{task}'{did_you_mean(task, manager.all_tasks)}; "
                    "`lm-eval ls tasks` lists them."
                )
        yield manager, [task + SUFFIX if task in local else task for task in tasks]


def local_task(task: str, data: Path, *, cache: str | None = None) -> dict[str, Any]:
    """lm-eval's task with its documents from `data`/TASK.jsonl. Raises TextError unless the file suits."""
    import lm_eval

    definition, changes = LOCAL[task]
    file = Path(os.path.expanduser(data)).absolute() / f"{task}.jsonl"
    _check_columns(file, changes)
    return {
        "include": str(Path(str(lm_eval.__file__)).parent / "tasks" / definition),
        "task": task + SUFFIX,
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": cache},
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
        **changes,
    }


def _check_columns(file: Path, changes: Mapping[str, Any]) -> None:
    wanted = {str(value).strip("{}") for key, value in changes.items() if key.startswith("doc_to") and value}
    try:
        with open(file, encoding="utf-8") as lines:
            first = json.loads(lines.readline(1_000_000))
    except FileNotFoundError as error:
        raise TextError(
            f"{file} is missing; put the documents there, or leave out --task-data to take the hub's."
        ) from error
    except (OSError, ValueError) as error:
        raise TextError(f"{file} holds no JSON lines ({first_line(error)}).") from error
    if lacking := sorted((wanted or {"text"}) - set(first if isinstance(first, dict) else ())):
        raise TextError(
            f"{file}: its first line has no column '{lacking[0]}'; see `requant/evaluation/tasks.py` for the columns."
        )


def _run(
    model: Any, tokenizer: Any, names: list[str], manager: Any, *, limit: int | None, quiet: bool
) -> Mapping[str, Any]:
    """lm-eval's results; what it prints goes to stderr, for stdout is ours."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    try:
        with (
            _undisturbed(evaluator),
            redirect_stderr(io.StringIO() if quiet else sys.stderr),
            redirect_stdout(sys.stderr),
        ):
            wrap: Any = HFLM  # its arguments are hidden by its metaclass
            found = evaluator.simple_evaluate(
                model=wrap(pretrained=model, tokenizer=tokenizer, batch_size=BATCH, device=str(model.device)),
                tasks=list(names),
                task_manager=manager,
                limit=limit,
                bootstrap_iters=BOOTSTRAPS,
                log_samples=True,  # differences are paired by document
                random_seed=None,  # type: ignore[arg-type]  # the caller's generators stay as they are
                numpy_random_seed=None,  # type: ignore[arg-type]
                torch_random_seed=None,  # type: ignore[arg-type]
            )
    except Exception as error:  # data sets, their servers and lm-eval fail in ways of their own
        if isinstance(error, RequantError) or is_out_of_memory(error):
            raise
        raise TextError(
            f"lm-eval failed ({class_and_first_line(error)}); without a network give --task-data FOLDER."
        ) from error
    assert found is not None  # None is for ranks other than the first
    return found


@contextmanager
def _undisturbed(evaluator: Any) -> Iterator[None]:
    """No process pool for a second of bootstrapping, and no collecting of git and environment information.

    The latter takes seconds, and outside of a repository git prints an error.
    """
    pools = os.environ.get("DISABLE_MULTIPROC")
    names = ("get_git_commit_hash", "add_env_info")
    asked = {name: getattr(evaluator, name) for name in names if hasattr(evaluator, name)}
    os.environ["DISABLE_MULTIPROC"] = "1"
    for name in asked:
        setattr(evaluator, name, lambda *_: None)
    try:
        yield
    finally:
        for name, function in asked.items():
            setattr(evaluator, name, function)
        del os.environ["DISABLE_MULTIPROC"]
        if pools is not None:
            os.environ["DISABLE_MULTIPROC"] = pools


def _scores(model: str, results: Mapping[str, Any]) -> list[TaskScore]:
    """Every number of lm-eval's table."""
    counts = results.get("n-samples", {})
    scores = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, _, filtered = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not filtered:
                continue
            error = metrics.get(f"{metric}_stderr,{filtered}")
            scores.append(
                TaskScore(
                    model=model,
                    task=task.removesuffix(SUFFIX),
                    metric=metric if filtered == "none" else f"{metric} ({filtered})",
                    value=float(value),
                    stderr=float(error) if isinstance(error, int | float) else None,
                    documents=int(counts.get(task, {}).get("effective", 0)),
                )
            )
    return scores


def _by_document(results: Mapping[str, Any]) -> dict[tuple[str, str], list[float]]:
    """(task, metric) -> the metric of every document in order, for metrics that are a number a document."""
    found: dict[tuple[str, str], list[float]] = {}
    for task, samples in results.get("samples", {}).items():
        for sample in sorted(samples, key=lambda sample: sample["doc_id"]):
            for metric in sample.get("metrics", ()):
                value, filtered = sample.get(metric), sample.get("filter", "none")
                if isinstance(value, int | float):
                    name = metric if filtered == "none" else f"{metric} ({filtered})"
                    found.setdefault((task.removesuffix(SUFFIX), name), []).append(float(value))
    return found


def _with_difference(
    score: TaskScore,
    by_document: Mapping[tuple[str, str], Sequence[float]],
    first: Mapping[tuple[str, str], Sequence[float]],
) -> TaskScore:
    """The score with its difference to the first model on the same documents, if it is a mean over documents."""
    own, others = (values.get((score.task, score.metric), ()) for values in (by_document, first))
    found = mean_difference(own, others)
    if found is None or not math.isclose(statistics.fmean(own), score.value, abs_tol=1e-9):
        return score
    return replace(score, difference=found[0], difference_stderr=found[1])
