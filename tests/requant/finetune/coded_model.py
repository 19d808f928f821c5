"""A tiny model of which some matrices are coded, as training gets it, and a run in mode `best` that trains one."""

from pathlib import Path

import torch

from requant.finetune.blockwise import BlockwiseStep
from requant.finetune.scaled_rows import ScaledRows
from requant.finetune.step import ReparametrizedWeight, TrainableTensor
from requant.finetune.teacher import HeadTeacher
from requant.formats.quantized_weight import trainable_params, weight_function
from requant.models.experts import unfuse_experts
from requant.models.targets import find_linears
from requant.pipeline.preparation.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe
from requant.run.context import RunContext
from requant.run.workspace import Workspace


class Problem:
    """A model with every second matrix coded, or those of some kinds, its teacher, and all that learns by name."""

    def __init__(self, model, random_weight, kinds: tuple[str, ...] = (), dtype=torch.float32) -> None:
        unfuse_experts(model)
        self.model = model
        targets = find_linears(model)
        self.coded = [target for target in targets if target.kind in kinds] if kinds else targets[::2]
        weights = {
            t.name: random_weight(
                *t.shape, kind="trellis", seed=i, density=0.0 if t.experts or i % 2 else 0.05
            ).to(model.device)
            for i, t in enumerate(self.coded)
        }
        self.params = {name: trainable_params(weight) for name, weight in weights.items()}
        self.derived = []
        for target in self.coded:
            floats, params = weight_function(weights[target.name], dtype), self.params[target.name]
            value = lambda floats=floats, params=params, target=target: target.oriented(floats(params))  # noqa: E731
            rows = [] if target.transposed else floats.scaled_rows(params)
            self.derived.append(
                ReparametrizedWeight(
                    parameter=target.parameter,
                    value=value,
                    rows=[ScaledRows(scales=scales, unscaled=unscaled) for scales, unscaled in rows],
                    stack=None if target.experts is None else (target.experts, target.kind),
                )
            )
        coded = {id(target.parameter) for target in self.coded}
        self.learning = {name: p for name, p in model.named_parameters() if id(p) not in coded}
        for name, params in self.params.items():
            self.learning |= {f"{name}.{field}": value for field, value in params.items()}

    def step(
        self, teacher: HeadTeacher, hidden_weight: float = 0.0, graphs_kept: int = 0, batch_tokens: int = 64
    ) -> BlockwiseStep:
        return BlockwiseStep(
            self.model,
            teacher,
            [TrainableTensor(tensor=t, lr=1e-2) for t in self.learning.values()],
            self.derived,
            batch_tokens=batch_tokens,
            graphs_kept=graphs_kept,
            hidden_weight=hidden_weight,
        )


def run_of(folder: Path, text: Path, dtype: str = "auto", **changes) -> RunContext:
    recipe = Recipe(
        model=str(folder),
        mode="best",
        method="kmeans",
        quantizer=METHODS["kmeans"].config(bits=2),
        calibration=Calibration(text=(str(text),), num_samples=12, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=Finetune(
            **{
                "steps": 12,
                "tokens_per_step": 128,
                "lr": 3e-2,
                "warmup_steps": 2,
                "val_windows": 1,
                "eval_every": 4,
            }
            | changes
        ),
    )
    prepared = prepare(str(folder), recipe, dtype=dtype)
    return start(prepared, recipe, workspace=Workspace(None), quiet=True)
