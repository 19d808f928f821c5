"""`requant sensitivity`."""

import json
from pathlib import Path
from typing import Annotated, Unpack

from requant.cli import options as opt
from requant.cli.common import importing, log_to_stderr, table
from requant.errors import RecipeError


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
