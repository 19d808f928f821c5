"""`requant sweep`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Unpack

from requant.cli import options as opt
from requant.cli.common import (
    comma_separated,
    importing,
    log_to_file,
    log_to_stderr,
    sigterm_interrupts,
    table,
)
from requant.recipe.sizes import parse_budgets


def sweep(
    bits: Annotated[str, opt.of_recipe(help="Bits to try, such as 2,2.5,3,4.")],
    model: opt.Model = None,
    recipe: opt.RecipeName = None,
    output: Annotated[Path | None, opt.of_run(help="Folder to write. [./MODEL-METHOD-sweep]")] = None,
    device: opt.Device = "auto",
    gpu_memory: opt.GpuMemory = None,
    dtype: opt.Dtype = "auto",
    resume: Annotated[
        bool,
        opt.of_run(
            "--resume",
            help="Keep finished checkpoints; `--resume OUTPUT` alone takes all arguments from that run.",
        ),
    ] = False,
    save_every: opt.SaveEvery = 10.0,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
    log_file: opt.LogFile = None,
    **options: Unpack[opt.QuantizeOptions],
) -> None:
    """Quantize at several bits and measure KL against size. Statistics are collected once."""
    # before the imports that take seconds
    budgets = parse_budgets(comma_separated(bits, "--bits"))
    with importing():
        from requant import progress
        from requant.models.devices import limit_gpu_memory, pick_device
        from requant.report.sweep import sweep

    log_to_stderr(verbose)
    log_to_file(log_file)
    if gpu_memory is not None:
        limit_gpu_memory(gpu_memory, pick_device(device))
    with sigterm_interrupts(), progress.display(shown=not quiet):
        found = sweep(
            model,
            budgets,
            output,
            recipe,
            device=device,
            dtype=dtype,
            resume=resume,
            save_every=60 * save_every,
            arguments=sys.argv[1:],
            quiet=quiet and log_file is None,
            **options,
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
        return
    print(table([entry.cells() for entry in found.entries]))
    print(found.answer)
    print(f"page: {found.page}")
