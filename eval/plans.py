"""The rows of `eval.quality`: what each of them runs, under the name that `--rows` uses for it.

CURVE is mode `best` and its codes alone by budget, ABLATION what each part of it is worth, and PEERS_THAT_TRAIN are other
methods as their papers describe them, trained on the same text by `block_training.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eval import block_training
from requant.finetune.trainables import LR_OF_MANY
from requant.recipe.defaults import MOST_STEPS
from requant.recipe.schema import Finetune, Predictor
from requant.run.context import RunContext, Weights
from requant.run.rounds import FIRST_WEIGHT

FINETUNE = Finetune(steps=MOST_STEPS)  # the default for models of up to 240 M parameters
FOUR_ROUNDS = Finetune(steps=450, rounds=4, lr=LR_OF_MANY)  # in all as many steps as six rounds of 300
NO_HIDDEN = dataclasses.replace(FOUR_ROUNDS, hidden_weight=0.0)
SHORT = dataclasses.replace(NO_HIDDEN, steps=225)  # for comparing parts, trained by the KL divergence alone
AT_THE_END = Finetune(steps=6 * MOST_STEPS)  # as many as all phases of mode `best` together
BY_BLOCK = Finetune(steps=6 * MOST_STEPS // 4, rounds=4)  # the same in the four phases of QTIP's blocks


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One line of the curve, at any bits."""

    label: str
    mode: str = "best"
    method: str = "trellis"
    options: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = "mul1"  # of trellis matrices; None: the default at these bits
    finetune: Finetune = FINETUNE
    statistics: int = 4  # times the windows of the study
    quarters: bool = True
    predictor: Predictor = "curvature"
    first_round_weight: float | None = 1.0  # None: the default at these bits
    one_width: bool = False  # the same whole bits for all codes; what else is stored comes on top
    head_bits: float | None = 16  # of embedding and head; None: as `--bits` chooses them
    make: Callable[[RunContext], Weights] | None = None  # makes the codes instead of the mode
    peer: str | None = None  # the peer's name, if the row is a peer's
    # written by the model, for training in addition to the text; None: the default number
    own_windows: int | None = 0
    by_size: bool = False  # `bits` is the size of the whole file in MB, which the budget splits


def _qtip(peer: str, label: str, code: str, **changes: Any) -> Plan:
    return Plan(
        label=f"{peer} in form, {label}",
        peer=peer,
        mode="dense",
        one_width=True,
        options={"code": code, "two_sided": False},
        **changes,
    )


def _efficient_qat(group_size: int) -> Plan:
    peer = f"EfficientQAT g{group_size}"
    return Plan(
        label=f"{peer} in form, 2 x {3 * MOST_STEPS} steps",
        peer=peer,
        mode="dense",
        method="rtn",
        one_width=True,
        options={"group_size": group_size},
        make=block_training.efficient_qat,
        finetune=Finetune(steps=3 * MOST_STEPS),
    )


def _steps(steps: int, *, tokens: int = FINETUNE.tokens_per_step, lr: float = LR_OF_MANY) -> Plan:
    return Plan(
        label=f"best, six rounds of {steps} steps of {tokens} tokens, a learning rate of {lr:g}",
        code=None,
        first_round_weight=None,
        finetune=dataclasses.replace(FINETUNE, steps=steps, tokens_per_step=tokens, lr=lr),
    )


def _own_text(windows: int) -> Plan:
    return Plan(
        label=f"best, trained on {windows} windows more, which the model wrote",
        own_windows=windows,
        code=None,
        first_round_weight=None,
    )


PLANS: dict[str, Plan] = {
    "best": Plan(
        label=f"best, six rounds of {MOST_STEPS} steps, with text that the model writes",
        own_windows=None,
        code=None,
        first_round_weight=None,
    ),
    "text-only": Plan(label=f"best, six rounds of {MOST_STEPS} steps", code=None, first_round_weight=None),
    "mul1": Plan(label="best, `mul1` codes", first_round_weight=None),
    "pair": Plan(label="best, `pair` codes", code="pair", first_round_weight=None),
    "four-rounds": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, losses not weighted", finetune=FOUR_ROUNDS
    ),
    "four-rounds-pair": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, losses not weighted, `pair` codes",
        finetune=FOUR_ROUNDS,
        code="pair",
    ),
    "four-rounds-weighted": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, losses weighted by round",
        finetune=FOUR_ROUNDS,
        first_round_weight=FIRST_WEIGHT,
    ),
    "weighted": Plan(label="best, losses weighted by round as at 2 bits", first_round_weight=FIRST_WEIGHT),
    "file": Plan(
        label="best, embedding and head by default, with text that the model writes",
        own_windows=None,
        head_bits=None,
        code=None,
        first_round_weight=None,
    ),
    "size": Plan(
        label="best, the best split of the file, with text that the model writes",
        own_windows=None,
        by_size=True,
        head_bits=None,
        first_round_weight=None,
    ),
    "size-codes": Plan(
        label="trellis codes, the best split of the file",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        by_size=True,
        head_bits=None,
    ),
    "file-codes": Plan(
        label="trellis codes, embedding and head by default",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        head_bits=None,
    ),
    "codes": Plan(label="trellis codes within the budget", mode="dense", finetune=Finetune(), statistics=1),
    "flat-codes": Plan(
        label="trellis codes, one width", mode="dense", finetune=Finetune(), statistics=1, one_width=True
    ),
    "codes-restored": Plan(
        label="trellis codes, bits by what restoring a matrix saves",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        predictor="restored",
    ),
    "restored": Plan(
        label="best, bits by what restoring a matrix saves, four rounds, hidden states not matched",
        finetune=NO_HIDDEN,
        predictor="restored",
    ),
    "codes-one-sided": Plan(
        label="codes alone, inputs' curvature only",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        options={"two_sided": False},
    ),
    "codes-whole-bits": Plan(
        label="codes alone, whole bits", mode="dense", finetune=Finetune(), statistics=1, quarters=False
    ),
    "short": Plan(label="best", finetune=SHORT),
    "blockwise": Plan(
        label="best, trained block by block", finetune=dataclasses.replace(SHORT, blockwise=True)
    ),
    "little-statistics": Plan(label="best, statistics of 128 windows", finetune=SHORT, statistics=1),
    "whole-bits": Plan(label="best, whole bits", finetune=SHORT, quarters=False),
    "no-rounds": Plan(
        label="best, trained at the end only", mode="dense", finetune=dataclasses.replace(SHORT, steps=900)
    ),
    "no-allocation": Plan(label="best, one width", finetune=SHORT, one_width=True),
    "one-sided": Plan(label="best, inputs' curvature only", finetune=SHORT, options={"two_sided": False}),
    "little-text": Plan(
        label="best, trained on 128 windows", finetune=dataclasses.replace(SHORT, train_windows=128)
    ),
    "own-text": _own_text(6144),
    "own-text-3x": _own_text(18432),
    "no-hidden": Plan(
        label=f"best, four rounds of {FOUR_ROUNDS.steps} steps, hidden states not matched", finetune=NO_HIDDEN
    ),
    "300-steps": _steps(300),
    "600-steps": _steps(600),
    "rate-8e-3": _steps(MOST_STEPS, lr=8e-3),
    "200-steps": _steps(200),
    "200-steps-8e-3": _steps(200, lr=8e-3),
    "200-steps-2e-2": _steps(200, lr=2e-2),
    "small-batches": _steps(1000, tokens=8192),
    "more-statistics": Plan(
        label="best, statistics of 2048 windows", code=None, first_round_weight=None, statistics=16
    ),
    "long": Plan(
        label="best, four rounds of 675 steps, hidden states not matched",
        finetune=dataclasses.replace(NO_HIDDEN, steps=675),
    ),
    "codebooks": Plan(label="best over codebooks", method="kmeans"),
    "qtip": _qtip(
        "QTIP 3INST",
        "trained by block and at the end",
        "3inst",
        make=block_training.qtip,
        finetune=BY_BLOCK,
    ),
    "qtip-1mad": _qtip(
        "QTIP 1MAD",
        "trained by block and at the end",
        "mul1",
        make=block_training.qtip,
        finetune=BY_BLOCK,
    ),
    "qtip-codes": Plan(
        label="QTIP 3INST in form, not trained",
        mode="dense",
        finetune=Finetune(),
        statistics=1,
        one_width=True,
        options={"code": "3inst", "two_sided": False},
    ),
    "qtip-end": _qtip("QTIP 3INST (end)", "trained at the end only", "3inst", finetune=AT_THE_END),
    "efficient-qat-64": _efficient_qat(64),
    "efficient-qat-128": _efficient_qat(128),
}
PEERS_THAT_TRAIN = tuple(f"{name}:{bits}" for bits in (2, 3, 4) for name, plan in PLANS.items() if plan.peer)
CURVE = (
    "best:2",
    "best:2.25",
    "best:2.5",
    "best:3",
    "best:3.5",
    "best:4",
    "best:5",
    "codes:2",
    "codes:2.5",
    "codes:3",
    "codes:4",
)
LEFT_OUT = ("whole-bits", "no-rounds", "no-allocation", "one-sided", "little-text", "little-statistics")
ABLATION = (
    *(f"{name}:{bits}" for bits in (2, 3, 4) for name in LEFT_OUT),
    "short:2:1",
    "short:2:2",
    "short:3:1",
    "short:3:2",
)
