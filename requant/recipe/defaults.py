"""Defaults of a run that depend on its mode, method, model or machine.

Every other default is the default of its field: in `schema.py`, or in the config class of the method.
"""

import dataclasses
import math

from requant.errors import RecipeError
from requant.quantizers.registry import METHODS, PRUNING_METHODS, find_method
from requant.quantizers.trellis import TrellisConfig
from requant.recipe.schema import Calibration, Detach, Evaluation, Finetune, Mode, Recipe

# On every device, so that the same command makes the same kind of checkpoint. On the demo at 3 bits its KL is a third of
# that of ReQuant as published over `lut`, and it takes longer (`recipes/README.md`).
MODE: Mode = "best"
METHOD_OF_MODE = {"best": "trellis", "paper": "lut", "dense": "lut"}
# Steps of a phase of mode `best` on a GPU, by the model's size: as many as take the arithmetic of 1000 steps of a model of
# 240 M parameters, within these bounds. On bench-32m 300, 600 and 1000 steps have a KL of .2285, .2227 and .2215 at 2 bits,
# .0169, .0167 and .0165 at 4; on a model of 1 B a step takes 0.32 s, and 200 steps a minute a phase. On a CPU none: four
# phases of 10 steps of 2048 tokens took a third more time on the demo, and 1 % off its KL.
MOST_STEPS = 1000
FEWEST_STEPS = 200
STEPS_TIMES_PARAMETERS = 240e9
# Times that training on a GPU sees a window, at most: where the text is too short for that, the original writes more itself.
SEEN_AT_MOST = 12
# Calibration windows of mode `best` on a GPU, twice those of a CPU: on bench-32m four times the tokens lowered the KL by
# 2 to 3 %.
GPU_SAMPLES = 256
# Bits per weight up to which trellis codes are `pair`: with two weights per hash a GPU decodes it in half the time. At 2
# bits it has 2.6 % more KL than `mul1` after training (bench-32m; 0.02 bits are worth that), and a model of 8 B writes 31
# % more tokens per second; at 3 and 4 bits it has 10 and 40 % more KL. All matrices have one code: choosing by width is
# worse.
PAIR_UP_TO = 2.0
PRUNING_METHOD = "alps"
RECOVERY_STEPS = 500  # 11 s on a GPU for a model of 32 M parameters
# of the steps of codes beside 2:4 values, whatever the number of training steps: as measured
SPARSE_LR = 3e-3
DEMO_CALIBRATION = Calibration(num_samples=16, seq_len=512)
DEMO_EVALUATION = Evaluation(context=512, windows=32)


def default_recipe(
    model: str,
    method: str | None,
    mode: str | None = None,
    *,
    gpu: bool = False,
) -> Recipe:
    """The recipe that `--bits` alone runs, with the method's own options and its published sparse part.

    Args:
        method, mode: None for MODE and the method of the mode.
        gpu: whether the run will have one.

    Raises RecipeError for an unknown method, and for 2:4 pruning.
    """
    mode = mode or MODE
    name = method or METHOD_OF_MODE.get(mode, METHOD_OF_MODE[MODE])  # an unknown mode is refused later
    find_method(name)  # refuses what is none
    if name not in METHODS:
        raise RecipeError(
            f"method '{name}' makes 2:4 matrices: run `requant sparsify --method {name}`, or choose one of "
            f"{', '.join(METHODS)}."
        )
    if mode == "sparse":
        raise RecipeError("mode sparse prunes to 2:4: run `requant sparsify`, or choose another --mode.")
    chosen = METHODS[name]
    recipe = Recipe(model=model, method=name, quantizer=chosen.config(), detach=Detach(**chosen.detach))
    if mode == "best":
        recipe = dataclasses.replace(
            recipe,
            mode="best",
            finetune=Finetune(steps=None, own_windows=None) if gpu else Finetune(),
            calibration=Calibration(num_samples=GPU_SAMPLES) if gpu else Calibration(),
        )
    return _for_demo(recipe) if model == "demo" else recipe


def finetune_steps(parameters: int) -> int:
    """Training steps of a phase for a model of so many parameters, to the nearest ten."""
    steps = round(STEPS_TIMES_PARAMETERS / parameters, -1)
    return int(min(MOST_STEPS, max(FEWEST_STEPS, steps)))


def needed_own_windows(finetune: Finetune, *, phases: int, windows: int, length: int) -> int:
    """Windows that the original has to write beside `windows` real ones, so that training sees none of them more than
    SEEN_AT_MOST times."""
    seen = phases * finetune.num_steps * finetune.tokens_per_step
    return max(0, math.ceil(seen / (SEEN_AT_MOST * length)) - windows)


def trellis_code(bits: float | None) -> str:
    """The trellis code of matrices that take so many bits per weight in all; None: a budget that does not say."""
    return "pair" if bits is not None and bits <= PAIR_UP_TO else TrellisConfig().code


def default_sparsify_recipe(model: str, method: str | None, *, steps: int) -> Recipe:
    """The recipe that `requant sparsify` runs, with `steps` of recovery; inputs are those of the pruned blocks.

    Raises RecipeError for a method that is none of PRUNING_METHODS.
    """
    name = method or PRUNING_METHOD
    chosen = find_method(name)
    if name not in PRUNING_METHODS:
        raise RecipeError(
            f"method '{name}' makes no 2:4 matrices: choose one of {', '.join(PRUNING_METHODS)}, or run "
            "`requant quantize`."
        )
    recipe = Recipe(
        model=model,
        mode="sparse",
        method=name,
        quantizer=chosen.config(),
        finetune=Finetune(steps=steps, lr=SPARSE_LR),
    )
    if model == "demo":
        recipe = _for_demo(recipe)
    inputs = "quantized" if "hessian" in chosen.needs else "original"
    return dataclasses.replace(recipe, calibration=dataclasses.replace(recipe.calibration, inputs=inputs))


def _for_demo(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, calibration=DEMO_CALIBRATION, evaluation=DEMO_EVALUATION)
