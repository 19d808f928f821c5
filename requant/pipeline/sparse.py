"""Mode `sparse`: prune every matrix to 2:4, then train what is kept.

prune        every linear by one of PRUNING_METHODS, on inputs of the already pruned blocks (`calibration.inputs`)
recover      `finetune.steps` of distillation (finetune/recovery.py)
"""

from requant import progress
from requant.finetune.recovery import recover
from requant.run.context import RunContext, Weights
from requant.run.quantize_linears import quantize_linears
from requant.run.stage_cache import load_stage, save_stage, stage_key


def sparse(run: RunContext) -> Weights:
    """2:4 matrices; the flip rates of training go into the run."""
    progress.enter("codes")
    if not run.recipe.finetune.trains:
        return quantize_linears(run, None, label="prune")
    key = stage_key(run, "flip-rates")
    weights, rates = load_stage(run, "recovered"), run.workspace.get("flip-rates", key)
    if weights is None or rates is None:
        pruned = quantize_linears(run, None, label="prune")
        run.statistics.clear()
        progress.enter("recovery")
        with run.stage("finetuning"):
            weights, flip_rates = recover(run, pruned, run.recipe.finetune, run.recipe.recovery)
        run.workspace.put("flip-rates", key, value=flip_rates)
        save_stage(run, "recovered", weights)
    else:
        flip_rates = rates.value
    run.flip_rates.extend(flip_rates)
    return weights
