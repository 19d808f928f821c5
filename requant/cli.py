"""The command line: parse, call the same functions that Python users call, print.

Exit codes: 0 done, 1 the run failed, 2 what was asked for cannot be done, 130 interrupted.
"""

import dataclasses
import errno
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import requant
from requant.errors import RequantError, is_out_of_memory

INTERRUPTED = "interrupted; `requant quantize` goes on where it stopped with --resume."
OUT_OF_MEMORY = (
    "memory is exhausted; lower --seq-len or --num-samples, use --dtype bfloat16, or --device cpu where the GPU is "
    "too small."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Post-training quantization with sensitivity metrics.",
)

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: float32 on the CPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log what the quantizers report.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"requant {requant.__version__}")
        raise typer.Exit


@app.command()
def quantize(
    model: Annotated[
        str | None,
        typer.Option(help="Folder, hub name, alias (llama-3.2-1b), or demo. [the recipe's, or demo]"),
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Bits of a code, 2 to 8.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A recipe by name or YAML file; other options override it.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="rtn, kmeans, gptq, awq or trellis.")] = None,
    mode: Annotated[str | None, typer.Option(help="paper: ReQuant as published; dense: codes only.")] = None,
    sensitivity: Annotated[str | None, typer.Option(help="pqi, hessian, gradient or marginal.")] = None,
    calibration: Annotated[
        list[str] | None, typer.Option(help="Text files, a datasets name, demo, or self.")
    ] = None,
    eval_text: Annotated[list[str] | None, typer.Option(help="Text to score; else a held-out part.")] = None,
    num_samples: Annotated[int | None, typer.Option(help="Calibration windows. [128; demo: 16]")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens of a calibration window. [2048; demo: 512]")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Pattern of matrices to leave alone; repeatable.")
    ] = None,
    tune: Annotated[
        int | None, typer.Option(help="Steps of training for scales, levels and residuals. [0]")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write. [./MODEL-METHOD-BITSbit]")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Annotated[int | None, typer.Option(help="Shifts the calibration windows.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last finished stage.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Quantize a model, measure what it cost, write a checkpoint and a report."""
    from requant.checkpoint import check_output
    from requant.options import output_folder, recipe_from_options
    from requant.pipeline import prepare, quantize
    from requant.plan import make_plan
    from requant.saving import result_rows
    from requant.workspace import Workspace

    _log(verbose)
    run = recipe_from_options(
        model=model,
        bits=bits,
        recipe=recipe,
        method=method,
        mode=mode,
        sensitivity=sensitivity,
        calibration=calibration,
        eval_text=eval_text,
        num_samples=num_samples,
        seq_len=seq_len,
        skip=skip,
        seed=seed,
    )
    folder = (output if output is not None else output_folder(run)).expanduser()
    if dry_run:
        plan = make_plan(prepare(run.model, run, device=device, dtype=dtype, quiet=quiet), run)
        print(json.dumps(dataclasses.asdict(plan), indent=2) if as_json else "\n".join(plan.lines()))
        return
    check_output(folder)
    workspace = Workspace(folder.with_name(folder.name + ".partial"), resume=resume)
    result = quantize(run.model, run, device=device, dtype=dtype, workspace=workspace, quiet=quiet)
    result.save(folder)
    workspace.remove()
    rows = result_rows(result, folder)
    print(json.dumps(rows, indent=2) if as_json else _table(rows))
    for warning in result.warnings:
        print(f"warning: {warning}", file=sys.stderr)


@app.command()
def sensitivity(
    model: Annotated[
        str | None, typer.Option(help="Folder, hub name, alias, or demo. [the recipe's, or demo]")
    ] = None,
    bits: Annotated[str | None, typer.Option(help="Bits of a code, 2 to 8.")] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe by name or YAML file.")] = None,
    method: Annotated[str | None, typer.Option(help="The quantizer whose step is scored.")] = None,
    calibration: Annotated[
        list[str] | None, typer.Option(help="Text files, a datasets name, demo, or self.")
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Calibration windows.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a window.")] = None,
    nodes: Annotated[str | None, typer.Option(help="gauss2, gauss4, midpoint, simpson or plain32.")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Pattern of matrices to leave alone; repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("sensitivity"),
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Annotated[int | None, typer.Option(help="Shifts the calibration windows.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score every weight by gradient, Hessian diagonal and PQI; compare predicted with measured dF."""
    from requant.checkpoint import check_output
    from requant.options import recipe_from_options
    from requant.scoring import sensitivity

    _log(verbose)
    run = recipe_from_options(
        model=model,
        bits=bits,
        recipe=recipe,
        method=method,
        mode="dense",
        sensitivity=None,
        calibration=calibration,
        eval_text=None,
        num_samples=num_samples,
        seq_len=seq_len,
        skip=skip,
        seed=seed,
        nodes=nodes,
    )
    check_output(output)
    found = sensitivity(run.model, run, device=device, dtype=dtype, output=output, quiet=quiet)
    rows = found.rows()
    print(json.dumps(rows, indent=2) if as_json else _table(rows))
    if not as_json:
        print(f"scores, table and plot: {output}")


@app.command(name="eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Models or checkpoints.")],
    text: Annotated[
        list[str] | None, typer.Option(help="Text to score. [demo-eval for demo, else WikiText-2 test]")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=8, help="Tokens of a window. [2048, or the model's positions]")
    ] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Score the first windows only.")] = None,
    against: Annotated[str | None, typer.Option(help="The original, for KL and agreement.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity, KL to the original and top-1 agreement, several models in one table."""
    from requant.comparison import evaluate_all

    rows = evaluate_all(
        models,
        text=text,
        context=context,
        windows=windows,
        against=against,
        device=device,
        dtype=dtype,
        quiet=quiet,
    )
    if as_json:
        print(json.dumps([row.to_dict() for row in rows], indent=2))
        return
    print(rows[0].quality.protocol)
    print(_table([row.cells() for row in rows]))


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    as_json: AsJson = False,
) -> None:
    """What a checkpoint stores, matrix by matrix and byte by byte; verifies its checksums."""
    from requant.comparison import inspection

    found = inspection(checkpoint)
    print(json.dumps(found.to_dict(), indent=2) if as_json else found.text())


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint or model.")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Text from a quantized model."""
    from requant.comparison import generate_text

    print(
        generate_text(
            checkpoint,
            prompt,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            device=device,
            dtype=dtype,
        )
    )


@app.command()
def recipes() -> None:
    """List the recipes that ship with requant."""
    from requant.recipe import available_recipes, load_recipe

    rows: list[dict[str, object]] = []
    for name in available_recipes():
        found = load_recipe(name)
        rows.append(
            {
                "recipe": name,
                "model": found.model,
                "mode": found.mode,
                "method": found.method,
                "bits": str(found.quantizer.bits),
            }
        )
    print(_table(rows))


def main() -> None:
    """Entry point: every failure that a user can mend becomes one sentence and an exit code."""
    try:
        app()
    except RequantError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:  # outside a command
        _fail(INTERRUPTED, 130)
    except SystemExit as exit:
        if exit.code == 130:  # typer's answer to Ctrl-C, which says nothing
            _fail(INTERRUPTED, 130)
        raise
    except Exception as error:
        if is_out_of_memory(error):
            _fail(OUT_OF_MEMORY, 1)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            _fail(f"the disk is full ({error.filename or 'a temporary file'}); free some space.", 1)
        raise


def _fail(message: str, code: int) -> None:
    print(f"requant: {message}", file=sys.stderr)
    sys.exit(code)


def _table(rows: Any) -> str:
    from requant.evaluation import format_table

    return format_table(rows)


def _log(verbose: bool) -> None:
    logging.basicConfig(format="requant: %(message)s", level=logging.INFO if verbose else logging.WARNING)
    for noisy in ("transformers", "datasets", "httpx"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
