"""`requant quantize`."""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

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
from requant.cli.launching import MOST_GPUS, check_gpus, ran_on
from requant.files import path_of
from requant.processes import is_first, started

if TYPE_CHECKING:
    from requant.pipeline.planning.plan import Plan
    from requant.pipeline.quantized_model import QuantizedModel
    from requant.recipe.schema import Recipe
    from requant.run.workspace import Workspace


def quantize(
    model: opt.Model = None,
    bits: opt.Bits = None,
    code_bits: opt.CodeBits = None,
    size: Annotated[
        str | None,
        opt.of_recipe(
            help="Total size that the weight files may have, such as 600MB.", callback=opt.valid_size
        ),
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
        opt.of_run(
            min=1, max=MOST_GPUS, help="How many GPUs to use, with one process each, as with torchrun. [1]"
        ),
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
    if is_first():
        if output is not None and not dry_run:
            check_new_output(output, resume=resume)
        if push_to is not None:
            _check_hub(push_to, ask=False)
    if not dry_run and ran_on(gpus, device):  # what follows is for the processes that work
        return
    with importing():
        from requant import progress, ranks
        from requant.models.devices import limit_gpu_memory

    log_to_stderr(verbose)
    log_to_file(log_file if is_first() else None)

    def accepted() -> _Request:
        where = _chosen_device(device, gpus, dry_run=dry_run)
        given = {"bits": bits, "code_bits": code_bits, "size": size, "target": target, **options}
        request = _request(recipe, model, given, device=where, gpu_memory=gpu_memory, output=output)
        if is_first() and not dry_run:
            _check_destinations(request.folder, push_to, resume=resume)
        return request

    by_first = accepted() if is_first() else None
    with ranks.joined(
        device if by_first is None else by_first.device, meanwhile=_import_stages
    ) as own_device:
        request = by_first or accepted()
        chosen, folder = request.recipe, request.folder
        if request.gpu_memory is not None:
            limit_gpu_memory(request.gpu_memory, own_device)
        if dry_run:
            plan = _plan(chosen, device=own_device, dtype=dtype, gpus=gpus, quiet=quiet)
            print_plan(plan, folder, as_json=as_json)
            return
        workspace = workspace_of(folder, resume=resume, save_every=save_every)
        with sigterm_interrupts(), progress.display(shown=not quiet):
            result = _quantize_and_save(
                request, workspace, device=own_device, dtype=dtype, quiet=quiet and log_file is None
            )
        if result is None:
            return
        workspace.remove()
        with importing():
            from requant.report.summary import result_numbers, result_rows

        numbers = result_numbers(result, folder)
        print_result(numbers, table(result_rows(numbers)), as_json=as_json)
        if push_to is not None:
            from requant.integrations.hub import push_to_hub

            print(f"pushed to {push_to_hub(folder, push_to)}", file=sys.stderr)
        if not (as_json or quiet):
            print(f"next: {next_commands(folder, target)}")


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What a command asks for, once it has been found that a run can begin."""

    recipe: "Recipe"
    device: str
    gpu_memory: int | None  # bytes of each GPU that the run may take; None: all
    folder: Path  # to write


def _request(
    recipe: str | None,
    model: str | None,
    given: dict[str, Any],
    *,
    device: str,
    gpu_memory: int | None,
    output: Path | None,
) -> _Request:
    """The request of a recipe and the options that were `given` beside it. Raises RecipeError, InputError."""
    with importing():
        from requant.recipe.options import output_folder, recipe_from_options

    chosen = recipe_from_options(recipe, model=model, gpu=device.startswith("cuda"), **given)
    if given["target"] is not None:
        from requant.pipeline.preparation.readable import check_readable

        check_readable(chosen, given["target"])
    folder = path_of(output if output is not None else output_folder(chosen), "output")
    return _Request(recipe=chosen, device=device, gpu_memory=gpu_memory, folder=folder)


def _chosen_device(device: str, gpus: int | None, *, dry_run: bool) -> str:
    """Where the run will be; the GPUs of a plan need not be here. Raises InputError where those of a run are not."""
    from requant.models.devices import pick_device

    where = pick_device(device)
    if not dry_run:
        check_gpus(started(), where, gpus=gpus, asked=device)
    elif gpus is not None and device == "auto":
        return "cuda"
    return where


def _check_destinations(folder: Path, push_to: str | None, *, resume: bool) -> None:
    """Raise RequantError unless the folder can be written, and the hub's repository too."""
    from requant.cli.resuming import check_new_output

    check_new_output(folder, resume=resume)
    if push_to is not None:
        _check_hub(push_to, ask=True)


def _check_hub(repo: str, *, ask: bool) -> None:
    from requant.integrations.hub import check_hub

    check_hub(repo, ask=ask)


def _plan(recipe: "Recipe", *, device: str, dtype: str, gpus: int | None, quiet: bool) -> "Plan":
    """The plan of a run here, for which the weights are read; or with `gpus`, wherever these are, from config.json alone."""
    with importing():
        from requant.models.devices import current_gpu
        from requant.pipeline.planning.plan import make_plan
        from requant.pipeline.preparation.outline import outline
        from requant.pipeline.preparation.prepare import prepare

    with current_gpu(device):
        if gpus is None:
            prepared = prepare(recipe.model, recipe, device=device, dtype=dtype, quiet=quiet)
        else:
            prepared = outline(recipe.model, recipe, device=device, dtype=dtype, gpus=gpus)
        return make_plan(prepared, prepared.recipe, device=device, quiet=quiet)


def _quantize_and_save(
    request: _Request, workspace: "Workspace", *, device: str, dtype: str, quiet: bool
) -> "QuantizedModel | None":
    """The run, and its checkpoint in the request's folder; None in every process but the first, which writes."""
    with importing():
        from requant import progress, ranks
        from requant.pipeline.quantize import quantize
        from requant.report.save import save

    recipe = request.recipe
    result = quantize(recipe.model, recipe, device=device, dtype=dtype, workspace=workspace, quiet=quiet)
    if ranks.rank() > 0:
        return None
    progress.enter("writing")
    workspace.check()
    save(result, request.folder, resumable=True)
    return result


def _import_stages() -> None:
    """Everything that a run imports in addition to torch, which takes seconds."""
    with importing():
        for module in ("requant.pipeline.quantize", "requant.report.save"):
            importlib.import_module(module)
