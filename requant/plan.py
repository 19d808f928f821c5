"""What a run will do and cost, before it starts: the dry run.

Bytes are exact for the dense part (they follow from the layout) and expected for the sparse part. Memory and time are
estimates: bytes held at the fullest stage, and floating-point operations over the rate of a short matrix product.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from requant.calibration.statistics import bytes_needed
from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.sizes import matrix_parts
from requant.formats import INDEX_TILE
from requant.models import LinearSite
from requant.pipeline import Prepared
from requant.quantizers import METHODS
from requant.recipe import Recipe
from requant.saving import bytes_before
from requant.sensitivity.pqi import NODES

FRACTION_OF_PEAK = 0.35  # of a plain matrix product's rate, as whole passes through small models reach it
QUANTIZER_SECONDS = {  # per weight: one CPU core, one H200; measured on bench-32m
    "rtn": (1e-8, 1e-9),
    "kmeans": (4e-7, 2e-8),
    "gptq": (4e-7, 2e-7),
    "awq": (5e-7, 4e-8),
    "trellis": (1e-4, 4e-7),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predictions for one run."""

    matrices: Mapping[str, int]  # kind -> how many
    weights: int
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    peak_memory: int
    seconds: float

    def lines(self) -> list[str]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.matrices.items())
        return [
            f"matrices        {sum(self.matrices.values())} ({kinds})",
            f"weights         {self.weights:,}",
            f"bits per weight {self.bits_per_weight:.3f}",
            f"bytes           {self.bytes_before:,} -> {self.bytes_after:,}",
            f"peak memory     about {self.peak_memory / 2**30:.2f} GiB",
            f"time            about {self.seconds:.0f} s",
        ]


def make_plan(prepared: Prepared, recipe: Recipe) -> Plan:
    """Predictions from shapes, the recipe and a matrix product of a tenth of a second."""
    sites = prepared.sites
    weights = sum(site.size for site in sites)
    fraction = _sparse_fraction(recipe)
    parts = sum(_bytes(site, recipe, fraction) for site in sites)
    model_bytes = bytes_before(prepared)
    stored = sum(site.size for site in sites) * _source_bytes_per_weight(prepared, model_bytes)
    kinds: dict[str, int] = {}
    for site in sites:
        kinds[site.kind] = kinds.get(site.kind, 0) + 1
    return Plan(
        matrices=kinds,
        weights=weights,
        bits_per_weight=8 * parts / weights,
        bytes_before=model_bytes,
        bytes_after=round(model_bytes - stored + parts),
        peak_memory=_peak_memory(prepared, recipe),
        seconds=_seconds(prepared, recipe),
    )


def _sparse_fraction(recipe: Recipe) -> float:
    if recipe.mode == "dense":
        return 0.0
    return recipe.detach.outlier_fraction + recipe.detach.significant_fraction


def _bytes(site: LinearSite, recipe: Recipe, fraction: float) -> float:
    n, k = site.shape
    sparse = 3 * fraction * n * k + (n * -(-k // INDEX_TILE) if fraction else 0)
    return sum(matrix_parts(_layout(recipe, (n, k))).values()) + sparse


def _layout(recipe: Recipe, shape: tuple[int, int]) -> MatrixLayout:
    """What the method's container will store for a matrix without residuals."""
    config: Any = recipe.quantizer
    match recipe.method:
        case "kmeans":
            return MatrixLayout(format="codebook", bits=config.bits, shape=shape)
        case "trellis":
            learned = recipe.tuning.steps > 0
            return MatrixLayout(
                format="trellis",
                bits=config.bits,
                shape=shape,
                code=config.code,
                input_signs=not learned,
                output_signs=not learned,
            )
    return MatrixLayout(
        format="grid",
        bits=config.bits,
        shape=shape,
        group_size=shape[1] if config.group_size == -1 else config.group_size,
        zero_points=not config.symmetric,
        column_scales=recipe.method == "awq",
    )


def _source_bytes_per_weight(prepared: Prepared, model_bytes: int) -> float:
    tensors = {p.data_ptr(): p.numel() for p in prepared.model.parameters()}
    return model_bytes / max(1, sum(tensors.values()))


def _peak_memory(prepared: Prepared, recipe: Recipe) -> int:
    """Model + the larger of {statistics, one float32 score a weight} + codes + originals (where they share memory)."""
    weights = sum(site.size for site in prepared.sites)
    model = sum(p.numel() * p.element_size() for p in prepared.model.parameters())
    own = weights * prepared.sites[0].parameter.element_size() if prepared.model.device.type == "cpu" else 0
    needs = METHODS[recipe.method].needs
    statistics = sum(bytes_needed(site, needs) for site in prepared.sites)
    embedding: Any = prepared.model.get_input_embeddings()
    activations = 6 * 4 * 2048 * embedding.weight.shape[0]
    return model + own + weights + max(4 * weights, statistics) + activations


def _seconds(prepared: Prepared, recipe: Recipe) -> float:
    weights = sum(site.size for site in prepared.sites)
    parameters = sum(p.numel() for p in prepared.model.parameters())
    backward = 6 * parameters * prepared.windows.numel()
    nodes = len(NODES[recipe.sensitivity.nodes]) if recipe.sensitivity.score == "pqi" else 1
    needs = METHODS[recipe.method].needs
    passes, quantizations, forwards = len(needs & {"fisher", "output_hessian"}), 1, len(needs & {"hessian"})
    if recipe.mode == "paper" and recipe.detach.outlier_fraction:
        passes += nodes
        quantizations += len(recipe.detach.temperatures)
        forwards += len(recipe.detach.temperatures)
    if recipe.mode == "paper" and recipe.detach.significant_fraction:
        passes += nodes * recipe.detach.steps
    passes += recipe.tuning.steps * recipe.tuning.tokens_per_step / prepared.windows.numel() * 4 / 3
    scored = 3 * 2 * parameters * prepared.scored.numel()
    work = backward * (passes + forwards / 3) + scored
    quantizer = QUANTIZER_SECONDS[recipe.method][prepared.model.device.type == "cuda"]
    return work / (FRACTION_OF_PEAK * _rate(prepared.model)) + quantizations * weights * quantizer


def _rate(model: torch.nn.Module) -> float:
    """Floating-point operations a second of a square matrix product in the model's dtype."""
    parameter = next(model.parameters())
    size = 4096 if parameter.is_cuda else 768
    a = torch.randn(size, size, device=parameter.device, dtype=parameter.dtype)
    torch.mm(a, a)
    runs, start = 0, time.perf_counter()
    while time.perf_counter() - start < 0.1:
        torch.mm(a, a)
        runs += 1
        if parameter.is_cuda:
            torch.cuda.synchronize()
    return 2 * size**3 * runs / (time.perf_counter() - start)
