"""`requant sparsify`."""

import dataclasses
from typing import Annotated, Unpack

from requant.cli import options as opt
from requant.cli.common import (
    importing,
    log_to_file,
    log_to_stderr,
    next_commands,
    print_plan,
    print_result,
    sigterm_interrupts,
    table,
)
from requant.files import path_of


class SparsifyOptions(opt.CalibrationOptions, total=False):
    """Options of `sparsify`, whose methods and defaults are others."""

    finetune_steps: Annotated[
        int | None,
        opt.of_recipe(help="Training steps after pruning. [500 on a GPU or with --recover, else 0]"),
    ]
    skip: opt.Skip
    num_samples: Annotated[int | None, opt.of_calibration(help="Calibration windows. [128; demo: 16]")]
    eval_text: opt.EvalText


def sparsify(
    model: opt.Model = None,
    pattern: Annotated[str, opt.of_recipe(help="2:4, the pattern that GPUs multiply.")] = "2:4",
    method: Annotated[
        str | None,
        opt.of_recipe(
            help="How kept weights are chosen: magnitude, wanda, sparsegpt or alps. [alps]",
            autocompletion=opt.values("alps", "sparsegpt", "wanda", "magnitude"),
        ),
    ] = None,
    recover: Annotated[
        str | None,
        opt.of_recipe(
            help="What training after pruning may change: fixed (values only), ast or s-ste (masks too). [fixed]",
            autocompletion=opt.values("fixed", "ast", "s-ste"),
        ),
    ] = None,
    bits: Annotated[int | None, opt.of_recipe(help="Bits of a kept weight: 2 to 8, or 16. [16]")] = None,
    recipe: opt.RecipeName = None,
    verify: Annotated[
        bool,
        opt.of_run(
            "--verify",
            help="Also quantize to the same size, and compare with the measured result instead of a prediction.",
        ),
    ] = False,
    output: opt.Output = None,
    device: opt.Device = "auto",
    gpu_memory: opt.GpuMemory = None,
    dtype: opt.Dtype = "auto",
    resume: opt.Resume = False,
    save_every: opt.SaveEvery = 10.0,
    dry_run: Annotated[bool, opt.of_run("--dry-run", help="Print the plan and stop.")] = False,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    log_file: opt.LogFile = None,
    **options: Unpack[SparsifyOptions],
) -> None:
    """Prune a model to 2:4 and retrain it. Says when plain codes are better."""
    from requant.cli.resuming import check_new_output, workspace_of

    if output is not None and not dry_run:  # what can be refused is, before the imports that take seconds
        check_new_output(output, resume=resume)
    with importing():
        from requant import progress
        from requant.models.devices import current_gpu, limit_gpu_memory, pick_device
        from requant.recipe.options import output_folder, sparsify_recipe

    log_to_stderr(verbose)
    log_to_file(log_file)
    own_device = pick_device(device)
    if gpu_memory is not None:
        limit_gpu_memory(gpu_memory, own_device)
    chosen = sparsify_recipe(
        recipe,
        model=model,
        gpu=own_device.startswith("cuda"),
        pattern=pattern,
        method=method,
        recover=recover,
        bits=bits,
        **options,
    )
    folder = path_of(output if output is not None else output_folder(chosen), "output")
    if not dry_run:
        check_new_output(folder, resume=resume)
    with importing():
        from requant.pipeline.planning.plan import make_plan
        from requant.pipeline.preparation.prepare import prepare
        from requant.pipeline.quantize import quantize
        from requant.pipeline.sparse_verdict import plain_codes, sparse_verdict, with_comparison
        from requant.report.save import save
        from requant.report.summary import result_numbers, result_rows

    if dry_run:
        with current_gpu(own_device):
            prepared = prepare(chosen.model, chosen, device=own_device, dtype=dtype, quiet=quiet)
            plan = with_comparison(
                make_plan(prepared, prepared.recipe, quiet=quiet), prepared, measure=verify
            )
        print_plan(plan, folder, as_json=as_json)
        return
    workspace = workspace_of(folder, resume=resume, save_every=save_every)
    silent = quiet and log_file is None
    with sigterm_interrupts(), progress.display(shown=not quiet):
        codes = plain_codes(
            chosen, device=own_device, dtype=dtype, workspace=workspace, measure=verify, quiet=silent
        )
        result = quantize(
            chosen.model, chosen, device=own_device, dtype=dtype, workspace=workspace, quiet=silent
        )
        found = sparse_verdict(result, codes)
        progress.enter("writing")
        workspace.check()
        save(result, folder, verdict=found, resumable=True)
    workspace.remove()
    numbers = {**result_numbers(result, folder), "verdict": dataclasses.asdict(found)}
    tables = (table(result_rows(numbers)), table(found.rows()), *found.sentences())
    print_result(numbers, *tables, as_json=as_json)
    if not (as_json or quiet):
        print(f"next: {next_commands(folder)}")
