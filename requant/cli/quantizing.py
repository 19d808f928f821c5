"""`requant quantize` and `requant sensitivity`."""

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

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
from requant.cli.launching import check_gpus, ran_on
from requant.errors import RecipeError
from requant.processes import is_first, started

if TYPE_CHECKING:
    from requant.recipe.schema import Recipe


class ScoreOptions(opt.CalibrationOptions, total=False):
    """Options of `sensitivity`, which measures no quality."""

    method: opt.Method
    group_size: opt.GroupSize
    symmetric: opt.Symmetric
    code: opt.Code
    skip: opt.Skip
    modules: opt.Modules
    nodes: Annotated[
        str | None,
        opt.of_recipe(
            help="Nodes of PQI's integral: gauss2, gauss4, midpoint, simpson or plain32. [gauss2]",
            autocompletion=opt.values("gauss2", "gauss4", "midpoint", "simpson", "plain32"),
        ),
    ]


def quantize(
    model: opt.Model = None,
    bits: opt.Bits = None,
    code_bits: opt.CodeBits = None,
    size: Annotated[
        str | None, opt.of_recipe(help="Total size that the weight files may have, such as 600MB.")
    ] = None,
    recipe: opt.RecipeName = None,
    target: Annotated[
        str | None,
        opt.of_recipe(
            "--for",
            help="The program that will read the export: vllm, transformers or llama.cpp. Picks mode, method and grid, and "
            "refuses before the run what it cannot read.",
            autocompletion=opt.values("vllm", "transformers", "llama.cpp"),
        ),
    ] = None,
    output: opt.Output = None,
    push_to: Annotated[
        str | None,
        opt.of_run(
            "--push-to-hub",
            help="OWNER/NAME: also upload the checkpoint to this repository of the hub; created as private if it is new.",
        ),
    ] = None,
    device: opt.Device = "auto",
    gpus: Annotated[
        int | None,
        opt.of_run(min=1, help="How many GPUs to use, with one process each, as with torchrun. [1]"),
    ] = None,
    gpu_memory: opt.GpuMemory = None,
    dtype: opt.Dtype = "auto",
    resume: opt.Resume = False,
    save_every: opt.SaveEvery = 10.0,
    dry_run: Annotated[
        bool,
        opt.of_run("--dry-run", help="Print the plan and stop; with --gpus from config.json alone."),
    ] = False,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    log_file: opt.LogFile = None,
    **options: Unpack[opt.QuantizeOptions],
) -> None:
    """Quantize a model, measure what it loses, write a checkpoint. Its folder also gets a report."""
    from requant.cli.resuming import check_new_output, workspace_of

    # what can be refused is, before the imports that take seconds, and by one of several processes
    if output is not None and not dry_run and is_first():
        check_new_output(output, resume=resume)
    if not dry_run and ran_on(gpus, device):  # what follows is for the processes that work
        return
    with importing():
        from requant import progress, ranks
        from requant.models.devices import limit_gpu_memory, pick_device
        from requant.recipe.options import output_folder, parse_size, recipe_from_options

    def accepted() -> tuple[str, "Recipe", Path, int | None]:
        """Device, recipe, the folder to write and the limit of memory, of a command that can be carried out."""
        log_to_stderr(verbose)
        log_to_file(log_file if is_first() else None)
        where = pick_device(device)
        if not dry_run:
            check_gpus(started(), where)
        elif gpus is not None and device == "auto":
            where = "cuda"  # the plan of GPUs that need not be here
        memory = None if gpu_memory is None else parse_size(gpu_memory, "--gpu-memory")
        chosen = recipe_from_options(
            recipe,
            model=model,
            gpu=where.startswith("cuda"),
            bits=bits,
            code_bits=code_bits,
            size=size,
            target=target,
            **options,
        )
        if target is not None:
            from requant.pipeline.readable import check_readable

            check_readable(chosen, target)
        folder = (output if output is not None else output_folder(chosen)).expanduser()
        if is_first() and not dry_run:
            check_new_output(folder, resume=resume)
            if push_to is not None:
                from requant.integrations.hub import check_hub

                check_hub(push_to)
        return where, chosen, folder, memory

    by_first = accepted() if is_first() else None
    with ranks.joined(device if by_first is None else by_first[0], meanwhile=_import_stages) as own_device:
        _, chosen, folder, memory = by_first or accepted()
        if memory is not None:
            limit_gpu_memory(memory, own_device)
        with importing():
            from requant.pipeline.outline import outline
            from requant.pipeline.plan import make_plan
            from requant.pipeline.prepare import prepare
            from requant.pipeline.quantize import quantize
            from requant.report.save import save
            from requant.report.summary import result_numbers, result_rows

        if dry_run:
            if gpus is None:
                prepared = prepare(chosen.model, chosen, device=own_device, dtype=dtype, quiet=quiet)
            else:
                prepared = outline(chosen.model, chosen, device=own_device, dtype=dtype, gpus=gpus)
            plan = make_plan(prepared, prepared.recipe, device=own_device, quiet=quiet)
            print_plan(plan, folder, as_json=as_json)
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
            save(result, folder, resumable=True)
        workspace.remove()
        numbers = result_numbers(result, folder)
        print_result(numbers, table(result_rows(numbers)), as_json=as_json)
        if push_to is not None:
            from requant.integrations.hub import push_to_hub

            print(f"pushed to {push_to_hub(folder, push_to)}", file=sys.stderr)
        if not (as_json or quiet):
            print(f"next: {next_commands(folder, target)}")


def _import_stages() -> None:
    """Everything that a run imports in addition to torch, which takes seconds."""
    with importing():
        for module in ("requant.pipeline.quantize", "requant.report.save"):
            importlib.import_module(module)


def sensitivity(
    model: opt.Model = None,
    bits: opt.Bits = None,
    code_bits: opt.CodeBits = None,
    recipe: opt.RecipeName = None,
    output: Annotated[Path, opt.of_run(help="Folder to write.")] = Path("sensitivity"),
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    **options: Unpack[ScoreOptions],
) -> None:
    """Score every weight by gradient, Hessian diagonal and PQI. Compares predicted with measured dF."""
    from requant.checkpoint.new_folder import check_output

    check_output(output)
    if recipe is None and bits is None and code_bits is None:  # `quantize` also takes a size
        raise RecipeError("say how many bits: --bits 1 to 8, or --code-bits, or name a --recipe.")
    from requant.recipe.options import recipe_from_options

    log_to_stderr(verbose)
    chosen = recipe_from_options(recipe, model=model, mode="dense", bits=bits, code_bits=code_bits, **options)
    with importing():
        from requant.report.score import score

    found = score(chosen.model, chosen, device=device, dtype=dtype, output=output, quiet=quiet)
    rows = found.rows()
    print(json.dumps(rows, indent=2) if as_json else table(rows))
    if not as_json:
        print(f"scores, table and plot: {output}")
