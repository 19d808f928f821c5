"""The state of training on disk, so that a run that dies can resume in the middle of a phase of training and end with the
same bytes.

    every `Workspace.save_every` seconds, and when SIGTERM or Ctrl-C ends the run in training:
        trained tensors, the optimizer's state, masks, the best values so far, the number of finished steps -> one file

Each file replaces the previous one atomically, and the last is removed when the stage has saved its weights
(`run/stage_cache.py`). It takes 12 bytes per trained number on disk (8 in `blockwise.py`), where it is written tensor by
tensor; what ranks divide is joined for that. Windows and learning rates follow from the number of a step, and nothing is
random, so the remaining steps are those of a run that was never interrupted.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from requant import ranks
from requant.errors import OutputError
from requant.finetune.divided import Part
from requant.formats.tensor_spec import TensorSpec
from requant.run.context import RunContext
from requant.run.stage_cache import TRAINING, training_key
from requant.run.workspace import Made, Stored, Workspace

MAX_FRACTION = 0.1  # of the time of a run that saving may take; where it would, states are saved less often
logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class SavedTraining:
    """The saved state of a stage's training.

    A stage may train in several rounds: `round` is the present one, and the state of a round takes the place of the one
    before. `record`: numbers that are noted on the way, and belong to the state.
    """

    workspace: Workspace
    key: str
    found: Stored | None  # what an earlier run left
    round: int = 0
    record: list[float] = field(default_factory=list)
    saved_at: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # that the last state took to save

    @classmethod
    def of(cls, run: RunContext, stage: str) -> "SavedTraining":
        key = training_key(run, stage)
        return cls(workspace=run.workspace, key=key, found=run.workspace.get(TRAINING, key))

    @property
    def round_is_over(self) -> bool:
        """Whether the state found is of a later round, and so holds all that this one left."""
        return self.found is not None and self.found.value["round"] > self.round

    def take(self) -> Stored | None:
        """The state found, which must be of this round; it is given once."""
        found, self.found = self.found, None
        if found is not None:
            self.record[:] = found.value["record"]
        return found

    @property
    def due(self) -> bool:
        """Whether it is time to save, by the clock of rank 0."""
        if self.workspace.folder is None:
            return False
        wait = max(self.workspace.save_every, self.seconds / MAX_FRACTION)
        return ranks.shared(time.monotonic() - self.saved_at >= wait, {})[0]

    def save(self, state: Callable[[], Mapping[str, Tensor | Part]], *, step: int, best_kl: float) -> None:
        """Replace the saved state by that after `step` steps; where that fails, say so and leave it.

        All ranks call it together, rank 0 writes the file.
        """
        if self.workspace.folder is None:
            return
        start = time.monotonic()
        value = {"round": self.round, "step": step, "best_kl": best_kl, "record": self.record}
        tensors = {
            name: Made(spec=TensorSpec(dtype=each.elements.dtype, shape=tuple(each.shape)), make=each.whole)
            if isinstance(each, Part)
            else each
            for name, each in state().items()
        }
        try:
            self.workspace.put(TRAINING, self.key, tensors=tensors, value=value)
        except OutputError as error:
            logger.warning("the state of training was not saved: %s", error)
        self.saved_at = time.monotonic()
        self.seconds = self.saved_at - start

    @contextmanager
    def interrupts_noted(self) -> Iterator[list[int]]:
        """While the context lasts, a first SIGINT or SIGTERM is put into the list, so that the step can end and be saved.

        A second one ends the run at once. Nothing changes where nothing is saved, for a signal that is ignored or has its
        usual meaning, in other threads than the main one, and for one of several processes, for the others would wait for
        its step.
        """
        noted: list[int] = []
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        main_thread = threading.current_thread() is threading.main_thread()
        if self.workspace.folder is None or ranks.world_size() > 1 or not main_thread:
            yield noted
            return

        def note(number: int, frame: object) -> None:
            if noted:
                raise KeyboardInterrupt
            noted.append(number)

        try:
            for number, handler in handlers.items():
                if callable(handler):
                    signal.signal(number, note)
            yield noted
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if noted:  # after the last step
            raise KeyboardInterrupt


def numbered(name: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors without names as they are saved: `name.0`, `name.1`, ..."""
    return {f"{name}.{i}": tensor for i, tensor in enumerate(tensors)}


@torch.no_grad()
def restore(tensors: Sequence[Tensor], name: str, state: Mapping[str, Tensor]) -> None:
    """Overwrite tensors by those that `numbered` named."""
    for i, tensor in enumerate(tensors):
        tensor.copy_(state[f"{name}.{i}"])
