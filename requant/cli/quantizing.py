"""`requant quantize` and `requant sensitivity`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from requant.cli.common import (
    RECIPE,
    RUN,
    AllExperts,
    AsJson,
    Calibration,
    Device,
    Dtype,
    EvalText,
    FinetuneSteps,
    For,
    GroupSize,
    HeadBits,
    LogFile,
    Method,
    Mode,
    Model,
    Modules,
    NumSamples,
    Output,
    Quiet,
    RecipeName,
    Rotations,
    SaveEvery,
    Score,
    Seed,
    SeqLen,
    Skip,
    Symmetric,
    Verbose,
    log_to_file,
    log_to_stderr,
    next_commands,
    recipe_options,
    sigterm_interrupts,
    table,
    values,
)


def quantize(
    model: Model = None,
    bits: Annotated[
        str | None,
        typer.Option(
            help="Bits a weight, 1 to 8, that everything stored for the matrices may take: 3, 2.25. Never exceeded.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    code_bits: Annotated[
        str | None,
        typer.Option(
            help="Instead: bits of every code; scales, levels and residuals come on top.",
            rich_help_panel=RECIPE,
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Bytes that the weight files may take in all, such as 600MB.", rich_help_panel=RECIPE
        ),
    ] = None,
    recipe: RecipeName = None,
    method: Method = None,
    mode: Mode = None,
    target: For = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = None,
    head_bits: HeadBits = None,
    sensitivity: Score = None,
    finetune_steps: FinetuneSteps = None,
    rotations: Rotations = None,
    skip: Skip = None,
    modules: Modules = None,
    calibration: Calibration = None,
    eval_text: EvalText = None,
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    all_experts: AllExperts = None,
    seed: Seed = None,
    output: Output = None,
    push_to: Annotated[
        str | None,
        typer.Option(
            "--push-to-hub",
            help="OWNER/NAME of the hub's repository that gets the checkpoint too; made private if it is new.",
            rich_help_panel=RUN,
        ),
    ] = None,
    device: Device = "auto",
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, help="GPUs to work on, each in a process, as with torchrun. [1]", rich_help_panel=RUN
        ),
    ] = None,
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
        bool,
        typer.Option(
            "--dry-run",
            help="Print the plan and stop; with --gpus from config.json alone.",
            rich_help_panel=RUN,
        ),
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    log_file: LogFile = None,
) -> None:
    """Quantize a model, measure the loss of quality, write a checkpoint and a report."""
    from requant.cli.resuming import check_new_output, workspace_of

    if output is not None and not dry_run:  # what can be refused is, before the imports that take seconds
        check_new_output(output, resume=resume)
    options = recipe_options(locals())
    from requant import progress, ranks
    from requant.models.devices import pick_device
    from requant.recipe.options import output_folder, recipe_from_options

    with ranks.joined(pick_device(device)) as own_device:
        log_to_stderr(verbose)
        log_to_file(log_file if ranks.rank() == 0 else None)
        if dry_run and gpus is not None and device == "auto":
            own_device = "cuda"  # the plan of GPUs that need not be here
        gpu = own_device.startswith("cuda")
        chosen = recipe_from_options(recipe, model=model, gpu=gpu, **options)
        if target is not None:
            from requant.exporters.readable import check_readable

            check_readable(chosen, target)
        folder = (output if output is not None else output_folder(chosen)).expanduser()
        if not dry_run:
            check_new_output(folder, resume=resume)
        from requant.cli.launching import ran_on
        from requant.integrations.hub import check_hub, push_to_hub
        from requant.pipeline.plan import make_plan
        from requant.pipeline.prepare import outline, prepare
        from requant.pipeline.quantize import quantize
        from requant.report.save import save
        from requant.report.summary import result_numbers, result_rows

        if dry_run:
            if gpus is None:
                prepared = prepare(chosen.model, chosen, device=own_device, dtype=dtype, quiet=quiet)
            else:
                prepared = outline(chosen.model, chosen, dtype=dtype, gpus=gpus)
            plan = make_plan(prepared, chosen, device=own_device, quiet=quiet)
            lines = [*plan.lines(), f"output          {folder}"]
            said = {**dataclasses.asdict(plan), "output": str(folder)}
            print(json.dumps(said, indent=2) if as_json else "\n".join(lines))
            return
        if push_to is not None:
            check_hub(push_to)
        if ran_on(gpus, device):
            return
        workspace = workspace_of(folder, resume=resume, save_every=save_every)
        silent = quiet and log_file is None
        with sigterm_interrupts(), progress.display(shown=not quiet):
            result = quantize(
                chosen.model, chosen, device=own_device, dtype=dtype, workspace=workspace, quiet=silent
            )
            if ranks.rank() > 0:
                return
            progress.enter("writing")
            workspace.check()
            save(result, folder)
        workspace.remove()
        numbers = result_numbers(result, folder)
        print(json.dumps(numbers, indent=2) if as_json else table(result_rows(numbers)))
        for warning in numbers["warnings"]:
            print(f"warning: {warning}", file=sys.stderr)
        if push_to is not None:
            print(f"pushed to {push_to_hub(folder, push_to)}", file=sys.stderr)
        if not (as_json or quiet):
            print(f"next: {next_commands(folder, target)}")


def sensitivity(
    model: Model = None,
    bits: Annotated[
        str | None, typer.Option(help="Bits a weight, all stored bytes counted, as of quantize.")
    ] = None,
    code_bits: Annotated[
        str | None, typer.Option(help="Instead: bits of every code, 2 to 8 (trellis from 1).")
    ] = None,
    recipe: RecipeName = None,
    method: Method = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="gauss2, gauss4, midpoint, simpson or plain32.",
            autocompletion=values("gauss2", "gauss4", "midpoint", "simpson", "plain32"),
            rich_help_panel=RECIPE,
        ),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Path("sensitivity"),
    group_size: GroupSize = None,
    symmetric: Symmetric = None,
    skip: Skip = None,
    modules: Modules = None,
    calibration: Calibration = None,
    num_samples: NumSamples = None,
    seq_len: SeqLen = None,
    all_experts: AllExperts = None,
    seed: Seed = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Score every weight by gradient, Hessian diagonal and PQI; compare predicted with measured dF."""
    from requant.checkpoint.new_folder import check_output

    check_output(output)
    options = recipe_options(locals())
    from requant.recipe.options import recipe_from_options

    log_to_stderr(verbose)
    chosen = recipe_from_options(recipe, model=model, mode="dense", **options)
    from requant.report.score import score

    found = score(chosen.model, chosen, device=device, dtype=dtype, output=output, quiet=quiet)
    rows = found.rows()
    print(json.dumps(rows, indent=2) if as_json else table(rows))
    if not as_json:
        print(f"scores, table and plot: {output}")
