"""`requant sparsify`."""

import dataclasses
import json
import sys
from typing import Annotated

import typer

from requant.cli.common import (
    CALIBRATION,
    RECIPE,
    RUN,
    AllExperts,
    AsJson,
    Calibration,
    Device,
    Dtype,
    EvalText,
    LogFile,
    Model,
    Output,
    Quiet,
    RecipeName,
    SaveEvery,
    Seed,
    SeqLen,
    Skip,
    Verbose,
    log_to_file,
    log_to_stderr,
    next_commands,
    recipe_options,
    sigterm_interrupts,
    table,
    values,
)


def sparsify(
    model: Model = None,
    pattern: Annotated[
        str, typer.Option(help="2:4, the pattern that GPUs multiply.", rich_help_panel=RECIPE)
    ] = "2:4",
    method: Annotated[
        str | None,
        typer.Option(
            help="How kept weights are chosen: magnitude, wanda, sparsegpt or alps. [alps]",
            autocompletion=values("alps", "sparsegpt", "wanda", "magnitude"),
            rich_help_panel=RECIPE,
        ),
    ] = None,
    recover: Annotated[
        str | None,
        typer.Option(
            help="What training after pruning may move: fixed (values only), ast or s-ste (masks too). [fixed]",
            autocompletion=values("fixed", "ast", "s-ste"),
            rich_help_panel=RECIPE,
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits of a kept weight: 2 to 8, or 16. [16]", rich_help_panel=RECIPE)
    ] = None,
    finetune_steps: Annotated[
        int | None,
        typer.Option(
            help="Training steps after pruning. [500 on a GPU or with --recover, else 0]",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    recipe: RecipeName = None,
    skip: Skip = None,
    calibration: Calibration = None,
    eval_text: EvalText = None,
    num_samples: Annotated[
        int | None, typer.Option(help="Calibration windows. [128; demo: 16]", rich_help_panel=CALIBRATION)
    ] = None,
    seq_len: SeqLen = None,
    all_experts: AllExperts = None,
    seed: Seed = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Quantize to the same bytes as well, and compare with what that measures in place of its prediction.",
            rich_help_panel=RUN,
        ),
    ] = False,
    output: Output = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue where the run stopped; `--resume OUTPUT` alone takes all arguments from it.",
            rich_help_panel=RUN,
        ),
    ] = False,
    save_every: SaveEvery = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and stop.", rich_help_panel=RUN)
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Prune a model to 2:4, and say for what plain codes of the same bytes are better."""
    from requant.cli.resuming import check_new_output, workspace_of

    if output is not None and not dry_run:  # what can be refused is, before the imports that take seconds
        check_new_output(output, resume=resume)
    options = recipe_options(locals())
    from requant import progress
    from requant.models.devices import pick_device
    from requant.recipe.options import output_folder, sparsify_recipe

    log_to_stderr(verbose)
    log_to_file(log_file)
    gpu = pick_device(device).startswith("cuda")
    chosen = sparsify_recipe(recipe, model=model, gpu=gpu, pattern=pattern, recover=recover, **options)
    folder = (output if output is not None else output_folder(chosen)).expanduser()
    if not dry_run:
        check_new_output(folder, resume=resume)
    from requant.pipeline.plan import make_plan
    from requant.pipeline.prepare import prepare
    from requant.pipeline.quantize import quantize
    from requant.pipeline.sparse_verdict import plain_codes, sparse_verdict
    from requant.report.save import save
    from requant.report.summary import result_numbers, result_rows

    if dry_run:
        plan = make_plan(
            prepare(chosen.model, chosen, device=device, dtype=dtype, quiet=quiet), chosen, quiet=quiet
        )
        print(json.dumps(dataclasses.asdict(plan), indent=2) if as_json else "\n".join(plan.lines()))
        return
    workspace = workspace_of(folder, resume=resume, save_every=save_every)
    silent = quiet and log_file is None
    with sigterm_interrupts(), progress.display(shown=not quiet):
        codes = plain_codes(
            chosen, device=device, dtype=dtype, workspace=workspace, measure=verify, quiet=silent
        )
        result = quantize(chosen.model, chosen, device=device, dtype=dtype, workspace=workspace, quiet=silent)
        found = sparse_verdict(result, codes)
        progress.enter("writing")
        workspace.check()
        save(result, folder, verdict=found)
        workspace.remove()
    numbers = {**result_numbers(result, folder), "verdict": dataclasses.asdict(found)}
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        print(table(result_rows(numbers)), table(found.rows()), *found.sentences(), sep="\n\n")
    for warning in numbers["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if not (as_json or quiet):
        print(f"next: {next_commands(folder)}")
