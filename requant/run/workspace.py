"""Results of finished stages on disk, so that a run that died can continue where it stopped.

Each result is one safetensors file (tensors, and a JSON value in its metadata) named `STAGE-KEY.safetensors`. The key is a
hash of everything the result depends on: the model's weights, the calibration tokens, the relevant part of the recipe, the
version of requant. So a changed recipe never finds an old result. Files are written in a folder of their own, tensor by
tensor, and then renamed: a result exists completely or not at all. The folder is created, and an old one cleared, only when
the first result is requested: a command that is refused before it starts to work destroys nothing. A lock next to the folder
keeps a second run out of it while the first one is alive, starting before its model is loaded; where locks do not work, the
older run stops (`ownership.py`).

With several processes, rank 0 opens, reads and tells the others; a result is written by the rank that made it. Keys do not
depend on ranks, so a run can resume with any number of them.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from filelock import BaseFileLock, FileLock, Timeout
from jaxtyping import Shaped
from torch import Tensor, nn

from requant import ranks
from requant.checkpoint.writer import write_as_made
from requant.errors import OutputError, WriteError
from requant.formats.tensor_spec import TensorSpec
from requant.models.hosted import whole_state
from requant.run.ownership import Owner, check_owner, claim

logger = logging.getLogger(__name__)
SAVE_EVERY = 600.0  # seconds
HASHING_THREADS = 8
WRITING = "writing"  # the folder of files that are not finished
# what is finished; whose it is
RESULT = re.compile(rf"[a-z-]+-[0-9a-f]{{32}}\.safetensors|run\.json(\.writing)?|{WRITING}")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What a stage left: tensors by name (CPU) and one JSON value."""

    tensors: Mapping[str, Tensor]
    value: Any


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tensor that all ranks make together at the moment when one of them writes it."""

    spec: TensorSpec
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "Made":
        """One that is there, on this rank's CPU or GPU."""
        return cls(
            spec=TensorSpec(dtype=tensor.dtype, shape=tuple(tensor.shape)), make=lambda: tensor.detach()
        )


class Workspace:
    """A folder of stage results; None keeps nothing, for runs from Python that need no resuming.

    `save_every`: seconds between two states of training (`finetune/saved_training.py`). `arguments`: those of the command
    line, for `--resume OUTPUT`. Where another run has taken the folder over, `put`, `discard`, `check` and `remove` raise
    RequantError.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        resume: bool = False,
        save_every: float = SAVE_EVERY,
        arguments: Sequence[str] | None = None,
    ) -> None:
        self.folder = folder
        self.arguments = arguments
        self.owner: Owner | None = None
        self.resume = resume
        self.save_every = save_every
        self.opened = False
        self.locked = False
        self.lock: BaseFileLock | None = None
        if folder is not None:
            self.lock = FileLock(folder.with_name(f"{folder.name}.lock"), is_singleton=True)  # one a process

    def get(self, stage: str, key: str) -> Stored | None:
        """The result of a stage, or None where it was not finished with this key; all ranks ask together."""
        if self.folder is None:
            return None
        found = self._read(stage, key) if ranks.rank() == 0 else None
        self.opened = True  # by rank 0, before the others go on
        value, tensors = ranks.shared(
            None if found is None else [found.value], {} if found is None else found.tensors
        )
        return None if value is None else Stored(tensors=tensors, value=value[0])

    def _read(self, stage: str, key: str) -> Stored | None:
        file = self._file(stage, key)
        if file is None or not file.is_file():
            return None
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
                return Stored(tensors=tensors, value=json.loads(opened.metadata()["value"]))
        except (OSError, safetensors.SafetensorError) as error:  # a machine that went down while writing
            logger.warning("%s is damaged (%s) and is made again.", file, error)
            return None

    def put(
        self,
        stage: str,
        key: str,
        *,
        tensors: Mapping[str, Tensor | Made] | None = None,
        value: Any = None,
        rank: int = 0,
    ) -> None:
        """Keep the result of a stage, which `rank` made, or all ranks alike; tensors are written one by one, from wherever
        they are. If one is yet to be `Made`, all ranks call this together."""
        # An empty file has no place for metadata in the format's library, hence the one dummy byte.
        given = tensors or {"none": torch.zeros(1, dtype=torch.uint8)}
        kept = {name: each if isinstance(each, Made) else Made.of(each) for name, each in given.items()}
        # in one order on all ranks, which states that were restored do not have
        order = sorted(kept, key=lambda name: (-kept[name].spec.dtype.itemsize, name))
        made = (kept[name].make() for name in order)
        file = self._file(stage, key) if rank == ranks.rank() else None
        if file is None:
            deque(made, maxlen=0)
            return
        self.check()
        aside = file.parent / WRITING / file.name
        try:
            aside.parent.mkdir(exist_ok=True)
            specs = {name: kept[name].spec for name in order}
            write_as_made(aside, specs, made, {"value": json.dumps(value)})
            os.replace(aside, file)
        except OSError as error:
            aside.unlink(missing_ok=True)
            deque(made, maxlen=0)  # which other ranks go on to make
            raise WriteError(
                f"{self.folder} cannot be written ({error.strerror or error}); free some space and run again with "
                "--resume."
            ) from error

    def discard(self, stage: str, key: str) -> None:
        """Delete a result that nothing will ask for again."""
        file = self._file(stage, key) if ranks.rank() == 0 else None
        if file is not None:
            self.check()
            file.unlink(missing_ok=True)

    def check(self) -> None:
        """Raise RequantError if another run has taken the folder over since this one opened it."""
        if self.folder is not None and self.owner is not None:
            check_owner(self.folder, self.owner)

    def remove(self) -> None:
        """Delete everything: the run is complete."""
        if self.folder is not None and self.opened and ranks.rank() == 0:
            self.check()
            shutil.rmtree(self.folder, ignore_errors=True)
            self._unlock()

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep other runs out of the folder while a model is loaded: of two that start together one is refused at once.

        Raises OutputError where a run is at work. Nothing is made or cleared but the lock, which goes with the context
        unless a result was asked for in it: from then on it is held as long as the run lives. What a killed run left stays.
        """
        left = self.lock is not None and Path(self.lock.lock_file).exists()
        if not self._acquired():
            yield
            return
        try:
            yield
        finally:
            if not self.opened:
                self._unlock(delete=not left)

    def _acquired(self) -> bool:
        """Whether the lock could be taken here; `_open` does it, or says what is in the way, where it could not."""
        if self.lock is None or self.locked or ranks.rank() > 0:
            return False
        if not Path(
            self.lock.lock_file
        ).parent.is_dir():  # which a run that is refused should not leave behind
            return False
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise self._taken() from None
        except (NotImplementedError, OSError):  # no locks here, or no permission
            return False
        self.locked = True
        return True

    def _taken(self) -> OutputError:
        return OutputError(
            f"another run is writing to {self.folder}; wait until it ends, or choose another --output."
        )

    def remove_leftover(self) -> None:
        """Delete what a run left that was killed when its output was complete. Raises OutputError where a run is at work."""
        if self.folder is None or self.lock is None:
            return
        if self.folder.is_dir() or Path(self.lock.lock_file).exists():
            self._open(self.folder)
            self.remove()

    def _file(self, stage: str, key: str) -> Path | None:
        if self.folder is None:
            return None
        if not self.opened:
            self._open(self.folder)
        return self.folder / f"{stage}-{key[:32]}.safetensors"

    def _open(self, folder: Path) -> None:
        """Make the folder; clear what an earlier run left, unless this one resumes it."""
        assert self.lock is not None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                if not self.locked:
                    self.lock.acquire(timeout=0)
                    self.locked = True
            except NotImplementedError:
                logger.warning("%s lies where files cannot be locked: do not run twice into it", folder)
            self._clear(folder)
            self.owner = claim(folder, self.arguments)
        except Timeout:
            raise self._taken() from None
        except OSError as error:
            if self.resume and error.errno in (errno.ENOSPC, errno.EDQUOT):  # another output would begin anew
                raise WriteError(
                    f"{folder} cannot be written ({error.strerror}); free some space and run again with --resume."
                ) from error
            raise OutputError(
                f"{folder} cannot be made ({error.strerror}); choose another --output."
            ) from error
        except OutputError:
            self._unlock()
            raise
        self.opened = True

    def _clear(self, folder: Path) -> None:
        for entry in folder.iterdir() if folder.is_dir() else ():
            if not RESULT.fullmatch(entry.name):
                raise OutputError(
                    f"{folder} holds {entry.name}, which no run of requant wrote; move that folder away, "
                    "or choose another --output."
                )
        if folder.exists():
            shutil.rmtree(folder / WRITING if self.resume else folder, ignore_errors=self.resume)
        folder.mkdir(parents=True, exist_ok=True)

    def _unlock(self, *, delete: bool = True) -> None:
        assert self.lock is not None
        if delete:
            Path(self.lock.lock_file).unlink(missing_ok=True)
        self.lock.release()
        self.locked = False


def digest(*parts: Any) -> str:
    """SHA-256 of tensors, bytes and JSON values, in order; floats by their shortest exact form."""
    state = hashlib.sha256()
    for part in parts:
        state.update(b"\0")  # 1, 23 is not 12, 3
        if isinstance(part, Tensor):
            state.update(f"{part.dtype}{tuple(part.shape)}".encode())
            state.update(raw_bytes(part))
        else:
            state.update(part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode())
    return state.hexdigest()


def model_digest(model: nn.Module, copies: Mapping[str, Tensor] | None = None) -> str:
    """A hash of every parameter and buffer of a model, by name; tensors are hashed side by side, and tied ones once.

    `copies` on the CPU of some of the tensors, by name, are read in place of what lies on a GPU.
    """
    tensors = whole_state(model) | dict(copies or {})
    places = {name: (t.data_ptr(), t.dtype, t.shape, t.stride()) for name, t in tensors.items()}
    distinct = {places[name]: tensor for name, tensor in tensors.items()}
    with ThreadPoolExecutor(HASHING_THREADS) as pool:  # hashing a large buffer releases the interpreter
        hashes = dict(zip(distinct, pool.map(digest, distinct.values()), strict=True))
    return digest(list(tensors), [hashes[place] for place in places.values()])


def raw_bytes(tensor: Shaped[Tensor, "..."]) -> Any:
    """The bytes of a tensor in row-major order, as a buffer, without a copy where it is on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
