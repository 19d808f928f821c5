"""What a model or checkpoint measures: `requant eval`, `requant bench` and `requant inspect`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from requant.cli import options as opt
from requant.cli.common import comma_separated, importing, log_to_stderr, table
from requant.errors import InputError
from requant.evaluation.lm_eval_package import check_lm_eval


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Models or checkpoints.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to score. [demo-eval for demo and what was made of it, else WikiText-2 test]"
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=8, help="Tokens of a window. [2048, or the model's positions; 512 for demo]"),
    ] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Score the first windows only.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The original model, for KL and top-1 agreement.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval instead of a text: piqa,arc_easy,...")
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(help="Folder with TASK.jsonl files, for tasks without a network.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only the first documents of each task.")
    ] = None,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Perplexity, KL and agreement with the original, or tasks. Several models make one table."""
    if tasks is not None:
        _refuse_with(
            "--tasks", {"--text": text, "--context": context, "--windows": windows, "--reference": reference}
        )
        names = _task_names(tasks)  # before the imports that take seconds
        check_lm_eval()
        with importing():
            from requant.evaluation.tasks import evaluate_tasks, score_rows

        log_to_stderr(verbose=False)
        scores = evaluate_tasks(
            models, names, data=task_data, limit=limit, device=device, dtype=dtype, quiet=quiet
        )
        print(json.dumps([s.to_dict() for s in scores], indent=2) if as_json else table(score_rows(scores)))
        return
    _refuse_with("the evaluation of a text", {"--task-data": task_data, "--limit": limit})
    with importing():
        from requant.evaluation.compare import evaluate_all

    log_to_stderr(verbose=False)
    rows = evaluate_all(
        models,
        text=text,
        context=context,
        windows=windows,
        reference=reference,
        device=device,
        dtype=dtype,
        quiet=quiet,
    )
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    print(rows[0].quality.protocol)
    print(table([row.cells() for row in rows]))


def _task_names(text: str) -> list[str]:
    """Whether there are such tasks is for lm-eval to say."""
    names = comma_separated(text, "--tasks")
    if not names:
        raise InputError("--tasks names no task; give lm-eval's names, separated by commas.")
    if blank := [name for name in names if len(name.split()) > 1]:
        raise InputError(f"--tasks {blank[0]} has blanks in it; separate lm-eval's names by commas.")
    return names


def _refuse_with(what: str, options: Mapping[str, object]) -> None:
    """Options of the other kind of evaluation are refused, not ignored."""
    if given := [option for option, value in options.items() if value is not None]:
        raise InputError(
            f"{given[0]} has no effect with {what}; run `requant eval` once with --tasks and once without."
        )


def bench(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    batch: Annotated[str | None, typer.Option(help="Batch sizes to measure, such as 1,8,64.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=2, help="Tokens written after each prompt.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="A second model to measure, such as the original.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile a decoding step with torch.compile.")
    ] = False,
    autotune: Annotated[
        bool,
        typer.Option("--autotune", help="Measure launch configs of the kernels first, and keep the best."),
    ] = False,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    as_json: opt.AsJson = False,
) -> None:
    """Tokens per second and memory of a model."""
    batches = _batches(batch)  # before the imports that take seconds
    with importing():
        from requant.evaluation import bench

    log_to_stderr(verbose=False)
    rows = bench.bench(
        checkpoint, reference=reference, batches=batches, prompt_tokens=prompt_tokens, new_tokens=new_tokens,
        device=device, dtype=dtype, compiled=compile, autotune=autotune,
    )  # fmt: skip
    print(
        json.dumps([row.to_dict() for row in rows], indent=1)
        if as_json
        else bench.speed_table(rows, compared=reference is not None)
    )


def _batches(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(
            f"--batch {text} is not a list of whole numbers from 1 on; give, for instance, 1,8,64."
        )
    return [int(part) for part in parts]


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    as_json: opt.AsJson = False,
) -> None:
    """Bytes by part, bits by matrix, and checksums of a checkpoint."""
    with importing():
        from requant.checkpoint.inspect import inspection

    found = inspection(checkpoint)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found.text())
