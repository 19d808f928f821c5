"""What training changes, and how fast: the trained tensors and their learning rates.

Three kinds of tensors are trained: the floats stored with the codes of quantized matrices (`trainable_params` of
`formats/contract.py`), the weights of matrices that are not quantized yet, and the parameters without codes: norms,
biases, and embedding and head until they are quantized. Each tensor's learning rate is in units of its root mean square.
The errors to correct are those of the codes, which halve with every bit, so the learning rate does too (`learning_rate`):
at 4 bits a third of the rate of 2 bits gives KL 0.0205, the same rate 0.0225, and codes alone 0.0229 (bench-32m).
"""

import math
from collections.abc import Collection, Mapping, Sequence

from torch import nn

from requant.allocation.embedding_and_head import embedding_and_head_of
from requant.finetune.step import TrainableTensor
from requant.formats.contract import TrainableParams
from requant.models.experts import routers
from requant.models.targets import QuantTarget
from requant.recipe.schema import Finetune
from requant.run.context import RunContext

RESIDUAL_LR = 3.0  # times the learning rate: a residual is one weight, not the scale of many
EMBEDDING_LR = 1 / 3  # times the learning rate: a token's row gets gradients only where the token occurs
# Learning rates of as many steps a phase and fewer, and of as many and more. On bench-32m 200 steps end at a KL of .2239
# with 8e-3 and .2312 with 3e-3 at 2 bits, at .0643 and .0646 at 3 (2e-2: .0658); 1000 steps at .0637 and .0621 at 3.
# Between them a power of the steps, which is not measured.
FEW_STEPS, LR_OF_FEW = 200, 8e-3
MANY_STEPS, LR_OF_MANY = 1000, 3e-3


def trainable_tensors(
    trainable: Mapping[str, TrainableParams],
    unquantized: Sequence[QuantTarget],
    other_params: Sequence[nn.Parameter],
    lr: float,
) -> list[TrainableTensor]:
    """All trained tensors: floats of quantized matrices, weights of `unquantized` ones, and parameters without codes."""
    trainables = [
        TrainableTensor(tensor=value, lr=lr * (RESIDUAL_LR if name == "values" else 1.0))
        for params in trainable.values()
        for name, value in params.items()
    ]
    trainables += [TrainableTensor(tensor=target.parameter, lr=lr) for target in unquantized]
    trainables += [
        TrainableTensor(tensor=p, lr=lr * (EMBEDDING_LR if p.dim() > 1 else 1.0)) for p in other_params
    ]
    return trainables


def learning_rate(run: RunContext, settings: Finetune) -> float:
    """Adam's learning rate at the run's average bits, in units of a tensor's root mean square."""
    bits = sum(run.config_of(target).bits * target.size for target in run.targets) / run.total_weights
    lr = default_lr(settings.num_steps) if settings.lr is None else settings.lr
    return lr * 2 ** (2 - bits)


def default_lr(steps: int) -> float:
    """The learning rate at 2 bits of a phase of so many steps."""
    steps = min(max(steps, FEW_STEPS), MANY_STEPS)
    power = math.log(LR_OF_FEW / LR_OF_MANY) / math.log(MANY_STEPS / FEW_STEPS)
    return LR_OF_MANY * (MANY_STEPS / steps) ** power


def params_without_codes(run: RunContext, quantized: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Name -> parameter without codes: norms, biases, routers, and embedding and head unless among `quantized`.

    Matrices that the recipe skips are not trained, nor are token tables.
    """
    parts = embedding_and_head_of(run.model).parts.values()
    tables = {id(part.weight) for part in parts if part.learns and part.name not in quantized}
    tables |= set(map(id, routers(run.model).values()))
    return {name: p for name, p in run.model.named_parameters() if p.dim() < 2 or id(p) in tables}
