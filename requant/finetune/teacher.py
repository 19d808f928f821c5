"""The teacher of the distillation: the original's logits on the training windows, with its last hidden states cached.

    logits_i = head(h_i),   h_i: last hidden states of window i, computed once

Windows come again in every epoch, in every round and in the last training, and the original does not change; running its
blocks would be a fifth of a step's arithmetic. Caching logits would take tens of times the memory (vocabulary size over
hidden size), so the head runs in every step. Whatever a model does after its blocks (scaling or capping logits) is
preserved: its whole forward pass runs, with a base model that returns the cached states. If that gives different logits, or
if the states would take more than a quarter of the free memory, the blocks run in every step. With several processes each
computes the states of its share of a step, and all of them keep those states, because the next epoch divides the windows
differently.

For a model that is trained block by block (`blockwise.py`) all states are computed once a run and kept on the host, in
memory or in a file, and only the head of the original is left on the GPU (`HeadTeacher`). With several processes each
computes the states of its share of the windows, into memory that all of them map. If the matrices are on the host
(`models/hosted.py`), a block comes once for as many batches as the host has room for.
"""

import copy
import logging
import os
import tempfile
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.batches import batches, own_chunks, windows_without_logits
from requant.calibration.block_by_block import batches_at_once
from requant.calibration.hidden_states import after_blocks, body_of
from requant.errors import InputError, first_line, is_out_of_memory
from requant.finetune.divided import rows_of_all
from requant.models.devices import free_memory, to_device
from requant.models.experts import grouped_products
from requant.models.hosted import hosted_blocks
from requant.models.mixed_precision import PRODUCTS, mixed_precision
from requant.models.targets import find_blocks, replaced_forward
from requant.progress import tracked

MAX_MEMORY_FRACTION = 0.25  # of what is free, for the states
MAX_HOST_FRACTION = 0.5  # of the host's free memory, for those of a HeadTeacher; more go to a file
SHARED_MEMORY = "/dev/shm"  # a folder of files in memory, of Linux
LOGITS_TOLERANCE = 1e-2  # relative Frobenius distance: caching may round a state to 16 bits once more
logger = logging.getLogger(__name__)


class StateCache:
    """Last hidden states of the original on training windows, as far as training has come to them, on the model's device.

    A window keeps the states of the first batch that held it, though another may compute them again and round otherwise. So
    a training that finds them learns from what it would compute itself, in batches of the same windows.
    """

    def __init__(self, model: PreTrainedModel, windows: Int64[Tensor, "b t"]) -> None:
        self.windows = windows
        self.states: Float[Tensor, "b t d"] | None = None
        self.output_class: type | None = None  # of the base model, once there are states
        self.cached = torch.zeros(len(windows), dtype=torch.bool)
        self.on_all_ranks = self.cached.clone()
        self.shares: bool | None = None  # all ranks keep states; None: not known yet
        head, device = model.get_output_embeddings(), model.device
        hidden_size = 0 if head is None else head.weight.shape[1]
        self.bytes = state_bytes(windows.numel(), hidden_size, device.type)
        fits = 0 < self.bytes <= MAX_MEMORY_FRACTION * free_memory(device)
        one_device = len({p.device for p in model.parameters()}) == 1
        self.works: bool | None = None if fits and one_device else False  # None: not tried yet

    @property
    def bytes_to_come(self) -> int:
        """Bytes of states that are not allocated yet and may be."""
        return 0 if self.works is False or self.states is not None else self.bytes

    def put(self, members: Int64[Tensor, " c"], states: Float[Tensor, "c t d"]) -> None:
        """Keep the states of those of a batch's windows that have none."""
        assert self.states is not None
        missing = (~self.cached[members]).nonzero()[:, 0]
        rows, places = (to_device(each, states.device) for each in (missing, members[missing]))
        self.states[places] = states[rows]
        self.cached[members] = True

    @torch.no_grad()
    def share(self, chosen: Int64[Tensor, " c"]) -> None:
        """Keep the states of all windows of a step, of which each rank has computed its own (`ranks.mine`).

        Every rank calls it after every step's batches, also without a window of its own.
        """
        if ranks.world_size() == 1:
            return
        if self.shares is None:
            self.shares = ranks.all_agree(self.states is not None)
        if not self.shares or self.on_all_ranks[chosen].all():
            return
        assert self.states is not None
        parts = [chosen[rank :: ranks.world_size()] for rank in range(ranks.world_size())]
        parts = [part[~self.on_all_ranks[part]] for part in parts]
        own = self.states[to_device(parts[ranks.rank()], self.states.device)]
        for part, states in zip(parts, rows_of_all(own, [len(part) for part in parts]), strict=True):
            self.states[to_device(part, self.states.device)] = states
            self.cached[part] = self.on_all_ranks[part] = True


class Teacher:
    """Logits of the original; `windows` are the training windows, whose states may be cached.

    `cache` is that of an earlier teacher on these windows, and of the same original; None: nothing is cached yet.
    """

    def __init__(
        self, model: PreTrainedModel, windows: Int64[Tensor, "b t"], cache: StateCache | None = None
    ) -> None:
        self.model, self.windows = model, windows
        self.cache = StateCache(model, windows) if cache is None else cache

    def micro_batches(
        self, chosen: Int64[Tensor, " c"], windows_each: int | None
    ) -> list[tuple[Tensor, ...]]:
        """Tokens of the chosen windows in micro-batches (`batches`), each with its states where they are cached."""
        batched = list(batches(self.windows[chosen], self.model, label=None, windows_each=windows_each))
        members = chosen.split(len(batched[0]))
        return [(tokens, *self._cached_states(m, tokens)) for m, tokens in zip(members, batched, strict=True)]

    @torch.no_grad()
    def logits(
        self, tokens: Int64[Tensor, "c t"], states: Float[Tensor, "c t d"] | None = None
    ) -> Float[Tensor, "c t v"]:
        """The original's logits; with `states` its blocks do not run."""
        if states is None:
            return self.model(input_ids=tokens, use_cache=False).logits
        assert self.cache.output_class is not None
        return logits_of_states(self.model, self.cache.output_class, tokens, states)

    @torch.no_grad()
    def _cached_states(
        self, members: Int64[Tensor, " c"], tokens: Int64[Tensor, "c t"]
    ) -> tuple[Tensor, ...]:
        """States of a micro-batch; if any is missing all are computed, for blocks are compiled for its shape."""
        cache = self.cache
        with mixed_precision(tokens):
            if cache.works is None:
                cache.works = self._caching_works(tokens)
            if not cache.works:
                return ()
            assert cache.states is not None
            if not cache.cached[members].all():
                cache.put(members, self.last_states(tokens))
            return (cache.states[to_device(members, cache.states.device)],)

    @torch.no_grad()
    def last_states(self, tokens: Int64[Tensor, "c t"]) -> Float[Tensor, "c t d"]:
        """The original's last hidden states, for `logits`; its blocks run."""
        self.cache.output_class, states = last_states(self.model, tokens)
        return states

    def _caching_works(self, tokens: Int64[Tensor, "c t"]) -> bool:
        """Whether the logits follow from the last states alone, tried on a first micro-batch."""
        reason = why_states_do_not_suffice(self.model, tokens)
        if reason is None:
            states = self.last_states(tokens)
            self.cache.states = states.new_empty(*self.windows.shape, states.shape[-1])
            return True
        logger.info("the original's blocks run at every step: %s", reason)
        return False


class HeadTeacher:
    """The head of the original, and its last hidden states on all windows, on the host.

    `model` holds the original weights now; it may hold others afterwards. The validation windows, if there are any, are
    numbered on from the training windows. `states` are what `states_on_host` gave for these windows and perhaps more
    after them; None: they are computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: Int64[Tensor, "b t"],
        val_windows: Int64[Tensor, "h t"] | None = None,
        *,
        states: tuple[type, Float[Tensor, "n t d"]] | None = None,
        label: str | None = None,
    ) -> None:
        self.windows = windows
        self.all_windows = windows if val_windows is None else torch.cat([windows, val_windows])
        self.val = range(len(windows), len(self.all_windows))
        self.output_class, self.states = states or states_on_host(model, self.all_windows, label=label)
        blocks = find_blocks(model)[1]
        # without the blocks, in whose place the memo puts an empty list
        self.model: PreTrainedModel = copy.deepcopy(model, {id(blocks): nn.ModuleList()})

    def micro_batches(
        self, chosen: Int64[Tensor, " c"], _windows_each: int | None
    ) -> list[tuple[Tensor, ...]]:
        """The tokens of the chosen windows and their states, on the model's device, as one micro-batch.

        Steps are issued ahead of the GPU, so that the copy runs while it still works on the step before.
        """
        device = self.model.device
        return [(to_device(self.all_windows[chosen], device), to_device(self.states[chosen], device))]

    @torch.no_grad()
    def logits(self, tokens: Int64[Tensor, "c t"], states: Float[Tensor, "c t d"]) -> Float[Tensor, "c t v"]:
        """The original's logits; of the tokens only the number counts."""
        return logits_of_states(self.model, self.output_class, tokens, states)


def state_bytes(tokens: int, hidden_size: int, kind: str) -> int:
    """Bytes of the last hidden states of so many tokens, of a model on a device of this kind (`last_states`); at most: a
    model in 16 bits on a CPU has half."""
    return tokens * hidden_size * PRODUCTS.get(kind, torch.float32).itemsize


def logits_of_states(
    model: PreTrainedModel, output_class: type, tokens: Int64[Tensor, "c t"], states: Float[Tensor, "c t d"]
) -> Float[Tensor, "c t v"]:
    """What the model makes of these last hidden states."""
    output = output_class(last_hidden_state=states)
    with replaced_forward(body_of(model), lambda *_, **__: output):
        return model(input_ids=tokens, use_cache=False).logits


def last_states(model: PreTrainedModel, tokens: Int64[Tensor, "c t"]) -> tuple[type, Float[Tensor, "c t d"]]:
    """The class of the base model's output, and its last hidden states."""
    output = body_of(model)(input_ids=tokens, use_cache=False)
    states = output.last_hidden_state
    # autocast would round them before the head anyway; without it the head reads what the base model gives
    return type(output), states.to(PRODUCTS.get(tokens.device.type, states.dtype))


@torch.no_grad()
def why_states_do_not_suffice(model: PreTrainedModel, tokens: Int64[Tensor, "c t"]) -> str | None:
    """Why the logits do not follow from the last states alone, tried on some windows as training does; None if they do."""
    blocks_ran = after_blocks(model, tokens, [tokens], precision=mixed_precision)
    with blocks_ran(0), mixed_precision(tokens):
        expected = model(input_ids=tokens, use_cache=False).logits
        try:
            output_class, states = last_states(model, tokens)
            from_states = logits_of_states(model, output_class, tokens, states)
            # a model that ignores the replaced blocks would give the same logits for any states
            from_zeros = logits_of_states(model, output_class, tokens, torch.zeros_like(states))
        except Exception as error:  # whatever a model of another kind raises
            if is_out_of_memory(error):
                raise
            return first_line(error)
    tolerance = LOGITS_TOLERANCE * expected.norm()
    if (from_states - expected).norm() <= tolerance < (from_zeros - expected).norm():
        return None
    return "its logits do not follow from its last hidden states alone"


@torch.no_grad()
def states_on_host(
    model: PreTrainedModel, windows: Int64[Tensor, "b t"], *, label: str | None = None
) -> tuple[type, Float[Tensor, "b t d"]]:
    """The class of the base model's output, and its last hidden states of all windows; every rank computes its share."""
    first = next(batches(windows[:1], model, label=None))
    with after_blocks(model, first, [first], precision=mixed_precision)(0), mixed_precision(first):
        output_class, one = last_states(model, first)
    found = _host_tensor((*windows.shape, one.shape[-1]), one.dtype)
    rows = windows_without_logits(windows.shape[1], gpu=one.is_cuda)
    own = own_chunks(windows, model, windows_each=rows)
    hosted = hosted_blocks(model) is not None
    # states before a block, after it, and the last ones
    at_once = batches_at_once(model, own, states=3) if hosted else len(own)
    with grouped_products(model):
        for part in (own[start : start + at_once] for start in range(0, len(own), at_once)):
            chunks = [None if each is None else each[1] for each in part]
            blocks_ran = after_blocks(model, windows, chunks, precision=mixed_precision, label=label)
            for index, each in enumerate(tracked(part, label=None if hosted else label, unit="batches")):
                if each is None:
                    continue
                tokens = to_device(each[1], one.device)
                with blocks_ran(index), mixed_precision(tokens):
                    _, states = last_states(model, tokens)
                start = each[0] * rows
                found[start : start + len(states)] = states.cpu()
    ranks.all_agree(True)  # those of the others are there
    return output_class, found


def _host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor, in a temporary file where memory is short. Raises InputError where the disk is full too.

    Of several processes all map the same file, which lies in memory where that suffices.
    """
    numel = torch.Size(shape).numel()
    size = numel * dtype.itemsize
    in_memory = size <= MAX_HOST_FRACTION * free_memory(torch.device("cpu"))
    if in_memory and ranks.world_size() == 1:
        return torch.empty(shape, dtype=dtype)
    name, problem = "", ""
    if ranks.rank() == 0:
        name, problem = _file_of(size, ([SHARED_MEMORY] if in_memory else []) + [tempfile.gettempdir()])
    name, problem = ranks.shared([name, problem], {})[0]
    if not name:
        raise InputError(
            f"the original's hidden states on the training text take {size / 1e9:.1f} GB, more than half of the free "
            f"memory and all of {tempfile.gettempdir()} ({problem}); lower finetune.train_windows, or set "
            "TMPDIR to a larger disk."
        )
    try:
        found = torch.from_file(name, shared=True, size=numel, dtype=dtype).view(shape)
        ranks.all_agree(True)  # all have mapped it
    finally:
        if ranks.rank() == 0:
            os.unlink(name)
    return found


def _file_of(size: int, folders: Sequence[str]) -> tuple[str, str]:
    """A new file of so many bytes in the first folder that has room, or no name, and what the last one said."""
    problem = ""
    for folder in filter(os.path.isdir, folders):
        with tempfile.NamedTemporaryFile(prefix="requant-states-", dir=folder, delete=False) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
                return file.name, ""
            except OSError as error:
                os.unlink(file.name)
                problem = first_line(error)
    return "", problem
