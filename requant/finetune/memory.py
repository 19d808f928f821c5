"""The peak memory of training, from shapes: for the dry run, before any weight is read.

With O weights of matrices without codes, C coded ones, R in embedding, head and norms, P = O + C + R, e bytes of the
model's own dtype, and c = 2 for the casts of autocast on a GPU (0 on a CPU, where there is none):

    as a whole        P (4 + c)     parameters in float32, and their casts
                    + P e           the teacher, a copy of the original
                    + 12 (O + R)    gradients, and two moments of Adam
                    + C (1 + 8)     codes; in float32 what they stand for before the scales, and gradients
                    + (O + R) / 2   on several GPUs: gradients rounded to 16 bits for their sum, of two parts of eight, and
                                    the largest tensor's, by which a part may be larger
                    + its states    of the teacher, where they are kept on the device; an activation for every linear, or,
                                    of a step that is one micro-batch, the gradients, if these are more

    block by block    8 O + 12 R + C (1 + e)    see `blockwise.py`
                    + R e                       the teacher's head
                    + its hidden states         before every block, float32, of all tokens of a step
                    + graphs that are kept      of a block: activations, casts of its weights, and those in float32 that are
                                                not there otherwise
                    + the larger of             one block: its weights' casts, gradients and activations, or a matrix's
                                                moments in float32 (not on a GPU); or the logits, with gradients

    hosted            12 R + R e                the model is larger than the GPU, all of its matrices are coded (`final.py`)
                    + 12 C / g                  scales of groups of g, with gradients and moments
                    + one block                 as above, and what its codes stand for before the scales; or decoded, the
                                                largest matrix with what lies between its codes and values
                    on the host                 packed codes, hidden states before every block, those of the teacher, and a
                                                copy of what learns

Token tables (`models/token_tables.py`) are a part of R that does not learn and has no gradients and moments: 12 bytes per
weight are subtracted when training as a whole, 8 when training block by block.

With N GPUs each holds 8 O / N of the matrices without codes, and the hidden states of its windows.

Every round turns open matrices into coded ones, so memory peaks in the first phase, but in the last one on three or more
GPUs, since coded matrices are whole on each GPU and 8 / N < 1 + e. Not counted is what a phase of several GPUs takes
briefly when it starts and ends: parameters that are whole next to the parts that learn; and what blocks hand on beside
hidden states (of ZAYA an eighth of these). A GPU that has more memory than that takes more windows at once: of a batch
(`windows_that_fit`), or through a block (`tokens_at_once`); and it keeps the graphs of as many blocks as it has room for
(`graphs_kept`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedModel

from requant.calibration.batches import tokens_at_once as tokens_of_a_batch
from requant.calibration.experts import share_of_experts
from requant.errors import RequantError, is_out_of_memory
from requant.finetune.blockwise import TOKENS_AT_ONCE, positions_at_once
from requant.finetune.compile_blocks import MIN_STEPS_TO_COMPILE
from requant.finetune.step import PARTS, STARTED
from requant.finetune.teacher import MAX_MEMORY_FRACTION, state_bytes
from requant.models.targets import QuantTarget, find_blocks
from requant.models.targets import by_block as by_block_of
from requant.models.token_tables import token_tables
from requant.recipe.schema import Finetune, Recipe
from requant.run.rounds import rounds_of

# Of both models. On a GPU in 16 bits, with a gradient (`divergence.py`), and one more for models that cap logits; elsewhere
# in float32, with logarithms and gradients.
BYTES_OF_A_LOGIT = {"cpu": 24, "cuda": 8}
DECODED_BYTES = 20  # a weight of the matrix that is decoded: float32, rotated back
FITS = 0.9  # of a GPU's memory, which training may take by the estimate
# the same with graphs that are kept, and more where torch cannot compile blocks: of 8B one of two H200s reserved 0.98 then
GRAPHS_FIT = 0.85
HOSTED_STATES = 4  # hidden states of a step on the GPU, where the others wait on the host: with gradients


@contextmanager
def exhaustion_explained(*, in_rounds: bool) -> Iterator[None]:
    """Training that runs out of memory all the same ends with what is left to do: its codes took most of the time.

    Without training, codes are those that it would begin with, unless it comes in rounds.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        without = "makes codes anew, without it" if in_rounds else "and --resume writes the codes without it"
        raise RequantError(
            "training does not fit in memory; --resume on a larger GPU goes on with it, the same command with "
            f"--finetune-steps 0 {without}."
        ) from error


def bytes_of_a_token(
    model: PreTrainedModel, targets: Sequence[QuantTarget], *, device: str, compiled: bool
) -> int:
    """What the gradients of a token keep: inputs and outputs of every linear that sees it, in float32, for all activations
    between them, in compiled blocks, with 16 bits, half of that; and the logits. 2.4 MB in a compiled 1B shape."""
    head, share = model.get_output_embeddings(), share_of_experts(model, targets)
    vocabulary = 0 if head is None else head.weight.shape[0]
    activations = 4 * sum(_activations(target, share) for target in targets)
    return activations // (2 if compiled else 1) + BYTES_OF_A_LOGIT[device] * vocabulary


def _activations(target: QuantTarget, share: float) -> int:
    """Numbers of a token's input and output, on average over tokens of which this `share` is routed to an expert."""
    return round(sum(target.shape) * (1.0 if target.experts is None else share))


def windows_that_fit(available: int, a_token: int, length: int, settings: Finetune) -> int:
    """Windows of `length` tokens that go through a model at once: those of a step, halved until half as much again is
    available, for the bytes of a token are an estimate; 0 if not even one fits."""
    windows = max(1, settings.tokens_per_step // length)
    while windows and 1.5 * windows * length * a_token > available:
        windows //= 2
    return windows


def copied_to_sum(learning: int, largest: int, *, gpus: int) -> int:
    """Bytes of gradients in 16 bits at once, while those of so many weights are summed over GPUs (`TrainingStep`).

    Parts end with the tensor that completes their eighth.
    """
    return 2 * (STARTED * learning // PARTS + largest) if gpus > 1 else 0


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """What a training holds, by the formulas above, and what it has room for.

    On one of `gpus` that work together, or on a CPU (not `gpu`), with `device_memory` bytes. `windows` (count, length) are
    those of training. `hosted`: the model is larger than the GPU, and `group_size` the columns that share a trained scale,
    if few do.
    """

    model: PreTrainedModel
    targets: Sequence[QuantTarget]
    settings: Finetune
    windows: tuple[int, int]
    by_block: bool
    gpu: bool
    device_memory: int
    gpus: int = 1
    hosted: bool = False
    group_size: int | None = None
    compiles: bool = True  # if there are enough steps for it

    def bytes_of_phase(self, coded: Collection[str], *, at_least: bool = False) -> int:
        """The peak while the matrices in `coded` have codes and all others learn. `at_least`: with one window at a time as a
        whole, and without graphs that are kept block by block, not with as many as there is room for."""
        of = self._with_codes(coded)
        if not self.by_block:
            return self._as_a_whole(of, at_least=at_least)
        needed = self._block_by_block(of, coded, self.tokens_at_once)
        return needed if at_least else needed + self.graphs_kept(coded) * self._graph(coded)

    def graphs_kept(self, coded: Collection[str], *, available: int | None = None) -> int:
        """The number of blocks whose graphs of a step's tokens a GPU can keep, in training block by block.

        `available`: bytes that this process may have now, with those that it has, if others are on the GPU. None of a model
        on the host, whose GPU has room for other matrices only while they are computed.
        """
        if not self.gpu or self.hosted:
            return 0
        of = self._with_codes(coded)
        memory = self.device_memory if available is None else min(self.device_memory, available)
        left = int(GRAPHS_FIT * memory) - self._block_by_block(of, coded, self.tokens_at_once)
        return min(of.blocks, max(0, left) // self._graph(coded))

    @cached_property
    def tokens_at_once(self) -> int:
        """Tokens that go through a block at once: all of a step where a GPU has room for them, else TOKENS_AT_ONCE.

        All phases of a run answer alike, since another number is another shape to compile; that without codes decides.
        """
        tokens = self._tokens
        if not self.gpu or tokens <= TOKENS_AT_ONCE:
            return TOKENS_AT_ONCE
        coded = {target.name for target in self.targets} if self.hosted else set[str]()
        needed = self._block_by_block(self._with_codes(coded), coded, tokens)
        return tokens if needed <= FITS * self.device_memory else TOKENS_AT_ONCE

    @cached_property
    def _weights(self) -> "_Weights":
        return _Weights.of(self.model, self.targets)

    @cached_property
    def _matrices(self) -> list[list["_Matrix"]]:
        share = share_of_experts(self.model, self.targets)
        return [
            [_Matrix(target.name, target.size, _activations(target, share)) for target in members]
            for members in by_block_of(self.targets)
        ]

    def _with_codes(self, coded: Collection[str]) -> "_Weights":
        """The model's numbers when these matrices have codes."""
        size = sum(matrix.size for members in self._matrices for matrix in members if matrix.name in coded)
        return replace(self._weights, coded=size, uncoded=self._weights.uncoded - size)

    @property
    def _tokens(self) -> int:
        """Tokens of a step on one GPU."""
        count, length = self.windows
        return length * -(-self.settings.windows_of_step(count, length) // self.gpus)

    @property
    def _compiled(self) -> bool:
        return self.gpu and self.compiles and self.settings.num_steps >= MIN_STEPS_TO_COMPILE

    @property
    def _cast(self) -> int:
        """Bytes of a weight's cast under autocast, which there is on a GPU."""
        return 2 if self.gpu else 0

    @property
    def _device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    def _as_a_whole(self, of: "_Weights", *, at_least: bool) -> int:
        (count, length), device = self.windows, self._device
        states = state_bytes(count * length, of.hidden_size, device)
        if states > MAX_MEMORY_FRACTION * self.device_memory:
            states = 0
        parameters = of.uncoded + of.coded + of.rest
        kept = parameters * (4 + self._cast + of.element_size)
        learning = of.uncoded + of.rest - of.tables
        kept += 12 * learning + 9 * of.coded + states
        if self.gpu:
            kept += copied_to_sum(learning, min(of.largest, learning), gpus=self.gpus)
        a_token = bytes_of_a_token(self.model, self.targets, device=device, compiled=self._compiled)
        if not self.gpu:
            return kept + tokens_of_a_batch(self.model, self._tokens // length, length, gpu=False) * a_token
        at_once = 0
        if not at_least:
            at_once = windows_that_fit(self.device_memory - kept, a_token, length, self.settings)
        if at_once:
            own = self._tokens // length
            activations = min(at_once, own) * length * a_token
            # those of a step that is one micro-batch are made while its activations go
            gradients = 4 * learning if at_once >= own else 0
            return kept - gradients + max(gradients, activations)
        return kept + length * bytes_of_a_token(self.model, self.targets, device=device, compiled=False)

    def _block_by_block(self, of: "_Weights", coded: Collection[str], at_once: int) -> int:
        """Bytes in training block by block, with so many tokens through a block at once and no graphs kept."""
        tokens = self._tokens
        kept = 8 * of.uncoded // self.gpus + 12 * of.rest - 8 * of.tables + of.rest * of.element_size
        at_work = self._block_at_work(coded, min(tokens, at_once))
        if self.hosted:
            kept += 0 if self.group_size is None else 12 * of.coded // self.group_size
            sizes = [[matrix.size for matrix in members] for members in self._matrices]
            block, decoded = max(map(sum, sizes)), DECODED_BYTES * max(map(max, sizes))
            at_work = of.element_size * block + max(at_work, decoded)
        else:
            kept += of.coded * (1 + of.element_size)
        hidden = 4 * tokens * of.hidden_size * (HOSTED_STATES if self.hosted else of.blocks + 2)
        positions = min(tokens, positions_at_once(of.vocabulary, self._device))
        logits = BYTES_OF_A_LOGIT[self._device] * of.vocabulary * positions + self._cast * of.embedding
        # moments of the largest tensor, which torch's Adam wants in float32
        moments = 0 if self.gpu else 4 * of.largest
        return kept + max(hidden + max(at_work, logits), moments)

    def _block_at_work(self, coded: Collection[str], tokens: int) -> int:
        """Bytes beside what is kept while the gradients of a block are computed, or its largest matrix is updated; of the
        block that takes most."""
        built = 8 if self.gpus > 1 else 4  # matrices that are not kept whole are beside their gradients
        found = 0
        for members in self._matrices:
            gradients = sum(
                matrix.size * ((8 if matrix.name in coded else built) + self._cast) for matrix in members
            )
            uncoded = [matrix.size for matrix in members if matrix.name not in coded]
            # torch's Adam wants them in float32
            moments = 0 if self.gpu else 4 * max(uncoded, default=0)
            activations = 4 * sum(matrix.activations for matrix in members)
            found = max(found, gradients + max(moments, tokens * activations))
        return found

    def _graph(self, coded: Collection[str]) -> int:
        """What a block that is not computed again keeps from forward to backward, of a step's tokens: activations, its
        weights' casts, and in float32 those that are not there otherwise. Of the block that keeps most."""
        found = 0
        for members in self._matrices:
            built = [matrix.size for matrix in members if self.gpus > 1 or matrix.name in coded]
            activations = (2 if self._compiled else 4) * sum(matrix.activations for matrix in members)
            casts = self._cast * sum(matrix.size for matrix in members)
            found = max(found, self._tokens * activations + casts + 4 * sum(built))
        return found


class _Matrix(NamedTuple):
    name: str
    size: int
    activations: int  # of a token


@dataclass(frozen=True, kw_only=True)
class _Weights:
    """What the formulas count: numbers of weights, unless said otherwise."""

    uncoded: int  # O, of matrices without codes
    coded: int  # C
    rest: int  # R, in embedding, head and norms
    tables: int  # those of R that do not learn
    embedding: int
    largest: int  # of one tensor that learns
    element_size: int  # e, bytes
    vocabulary: int
    hidden_size: int
    blocks: int

    @classmethod
    def of(cls, model: PreTrainedModel, targets: Sequence[QuantTarget]) -> "_Weights":
        """Those of a model in which no matrix has codes."""
        embedding = model.get_input_embeddings().get_parameter("weight")
        vocabulary, hidden_size = embedding.shape
        matrices = sum(target.size for target in targets)
        tables = {id(table.weight): table.weight.numel() for table in token_tables(model).values()}
        return cls(
            uncoded=matrices,
            coded=0,
            rest=sum(p.numel() for p in model.parameters()) - matrices,
            tables=sum(tables.values()),
            embedding=embedding.numel(),
            largest=max(p.numel() for p in model.parameters() if id(p) not in tables),
            element_size=embedding.element_size(),
            vocabulary=vocabulary,
            hidden_size=hidden_size,
            blocks=len(find_blocks(model)[1]),
        )


def fullest_phase(memory: TrainingMemory, recipe: Recipe) -> int:
    """The bytes of the phase that takes most: one after every round of mode `best`, else one at the end."""
    targets = memory.targets
    coded = {"sparse": [set[str]()]}.get(recipe.mode, [{target.name for target in targets}])  # by phase
    if recipe.trains_in_rounds:
        rounds = rounds_of(targets, recipe.finetune.rounds)
        coded = list(accumulate([{target.name for target in members} for members in rounds], set.union))
    return max(map(memory.bytes_of_phase, coded))


def hosted_training_bytes(
    model: PreTrainedModel,
    targets: Sequence[QuantTarget],
    recipe: Recipe,
    windows: tuple[int, int],
    *,
    gpus: int,
) -> int:
    """Bytes of the host that training takes beside a hosted model's matrices and codes, of all processes."""
    count, length = windows
    embedding = model.get_input_embeddings().get_parameter("weight")
    tokens = length * recipe.finetune.windows_of_step(count, length)  # of all processes together
    rest = sum(p.numel() for p in model.parameters()) - sum(target.size for target in targets)
    packed = packed_bytes(targets, recipe)  # each at the rank that decodes it
    before_blocks = 4 * tokens * embedding.shape[1] * len(find_blocks(model)[1])
    teacher = state_bytes(count * length, embedding.shape[1], "cuda")
    return packed + gpus * 4 * rest + before_blocks + teacher


def packed_bytes(targets: Sequence[QuantTarget], recipe: Recipe) -> int:
    """Bytes of the matrices' packed codes, about."""
    return round(sum(target.size for target in targets) * (recipe.budget.bits or recipe.quantizer.bits) / 8)
