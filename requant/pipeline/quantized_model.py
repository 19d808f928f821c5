"""What a run gives back: the quantized model, its codes, what was measured, and what to know before trusting it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from requant.allocation.knapsack import TOLERANCE
from requant.evaluation.diagnosis import DISAGREEMENT, Diagnosis
from requant.evaluation.perplexity import Quality
from requant.evaluation.samples import Sample
from requant.models.experts import Experts
from requant.pipeline.planning.statistics import most_needs
from requant.pipeline.preparation.prepare import Prepared
from requant.pipeline.preparation.recipe_targets import all_experts_counts
from requant.recipe.schema import Recipe
from requant.run.context import Allocation, Weights

MANY_NODES = ("gauss4", "plain32")  # of PQI's integral


@dataclass(frozen=True, kw_only=True, repr=False)
class QuantizedModel:
    """The outcome of a run: `model` holds the quantized weights as floats, `weights` the codes."""

    prepared: Prepared
    weights: Weights
    embedding_and_head: Weights  # where they are quantized; of tied ones the embedding
    allocation: Allocation | None
    recipe: Recipe
    before: Quality
    after: Quality
    diagnosis: Diagnosis
    seconds: dict[str, float]
    peak_memory: int  # bytes, of the GPU where there is one, else of the process
    samples: Sequence[Sample] = ()  # continuations by the original and by the quantized model
    # expert -> tokens of the calibration text that were routed to it
    routed_tokens: Mapping[str, int] = field(default_factory=dict)
    flip_rates: Sequence[float] = ()  # of 2:4 masks: the share that each update during training moved

    def __repr__(self) -> str:
        """One line, for a notebook shows what a cell ends with: the fields hold every code of the model."""
        return (
            f"QuantizedModel({self.recipe.model}: {len(self.weights)} matrices by {self.recipe.method}, "
            f"mode {self.recipe.mode}, KL {self.after.mean_kl:.4f})"
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.prepared.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.prepared.tokenizer

    @property
    def _what_of_that(self) -> str:
        if any(isinstance(module, Experts) for module in self.model.modules()):
            return (
                "the loss of a mixture jumps where a token changes its experts, which no gradient sees and more nodes do "
                "not change; the ranking leaves these jumps out."
            )
        if self.recipe.sensitivity.nodes in MANY_NODES:
            return "more nodes are not likely to help; do not trust the ranking."
        return "use more nodes (sensitivity.nodes: gauss4) before trusting the ranking."

    @property
    def warnings(self) -> list[str]:
        """What to know before trusting the result, a sentence each."""
        found = []
        if self.prepared.why_not_folded:
            found.append(
                f"Every matrix has its own rotations, not folded ones: {self.prepared.why_not_folded}."
            )
        disagreement = self.diagnosis.disagreement
        if disagreement is not None and disagreement > DISAGREEMENT:
            found.append(
                f"The sum of PQI differs from the measured dF by {disagreement:.1%}: {self._what_of_that}"
            )
        if self.allocation is not None and self.allocation.unspent > TOLERANCE:
            found.append(
                f"The matrices are too few to spend the budget: {self.allocation.unspent:.2%} of it stays unspent."
            )
        fitted = most_needs(self.recipe) or self.recipe.mode == "paper"  # codes of rtn and hqq need no text
        if fitted and (starved := self.starved_experts) and not all_experts_counts(self.recipe):
            least = min(starved, key=lambda expert: self.routed_tokens[expert])
            found.append(
                f"{len(starved)} of {len(self.routed_tokens)} experts saw fewer tokens of the calibration text than their "
                f"matrices have columns (least: {least}, {self.routed_tokens[least]:,}): their statistics are largely "
                "those of their layer; raise --num-samples."
            )
        return found

    @property
    def starved_experts(self) -> list[str]:
        """Experts that saw fewer tokens than the widest of their matrices has columns."""
        columns: dict[str, int] = {}
        for target in self.prepared.targets:
            expert = target.name.rpartition(".")[0]
            columns[expert] = max(columns.get(expert, 0), target.shape[1])
        return [expert for expert, tokens in self.routed_tokens.items() if tokens < columns.get(expert, 0)]
