"""Models larger than the GPU: matrices of transformer blocks stay in the host's memory and come to the GPU block by block.

    at rest     a matrix's parameter is a placeholder on the GPU, of its shape and dtype in the memory of one number
    block(h)    the block's matrices are made from their sources; they stay until another block is called
    source      the original, which is on the host (a view of the weight files, if those are mapped), or a function
                that computes the matrix on the GPU: decoded codes, a point of a path

Everything except these matrices (embedding, head, norms, biases) is on the GPU as usual. So such a model can be called
like any other, and gives the same bits. A pass over several batches is fast if it takes all of them through a block before
the next (`calibration/hidden_states.py`, `calibration/block_by_block.py`), since a block then comes only once for all of
them. Meanwhile the originals of the following block are read into pinned memory. Gradients require blocks that are
recomputed, one at a time: a graph over two blocks would read placeholders. In training, which computes the matrices from
their codes (`finetune/recomputed_block.py`), blocks bring nothing themselves (`bypassed`).
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

Source = Tensor | Callable[[], Tensor]  # [n, k]


class HostedMatrix:
    """One matrix on the host; `source` is what its parameter holds while its block is computed."""

    def __init__(self, name: str, parameter: nn.Parameter, *, transposed: bool, device: torch.device) -> None:
        self.name, self.parameter, self.transposed, self.device = name, parameter, transposed, device
        self.stored = parameter.data  # in the parameter's layout
        self.source: Source = self.original
        self.changed: Callable[[], None] = lambda: None
        # a source, and the same in memory that copies read faster
        self.ahead: tuple[Tensor, Tensor] | None = None
        self.release()

    @property
    def original(self) -> Float[Tensor, "n k"]:
        """The matrix as it was loaded, on the host; not to be changed."""
        return self.oriented(self.stored)

    def set_source(self, source: Source) -> None:
        """Make `source`, rounded to the parameter's dtype, the matrix from now on."""
        self.source = source
        self.changed()

    def load(self) -> None:
        """Fill the parameter."""
        self.parameter.data = self.value()

    def release(self) -> None:
        """Put the placeholder in the parameter's place."""
        one = torch.zeros(1, dtype=self.stored.dtype, device=self.device)
        self.parameter.data = one.expand(self.stored.shape)

    @torch.no_grad()
    def value(self) -> Tensor:
        """The matrix in the parameter's layout and dtype, on the GPU."""
        found = self.source() if callable(self.source) else self.source
        if self.ahead is not None and self.ahead[0] is found:
            found = self.ahead[1]
        value = torch.empty(self.stored.shape, dtype=self.stored.dtype, device=self.device)
        return value.copy_(self.oriented(found))

    def oriented(self, tensor: Tensor) -> Tensor:
        """A tensor in the parameter's layout seen as [n, k], or the reverse."""
        return tensor.T if self.transposed else tensor


class HostedBlocks:
    """The matrices of a model's blocks; at most those of one block, `loaded`, are on the GPU."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], matrices: Sequence[tuple[int, HostedMatrix]]
    ) -> None:
        self.matrices: list[list[HostedMatrix]] = [[] for _ in blocks]
        self.loaded: int | None = None
        self.precision = torch.get_float32_matmul_precision()
        for index, matrix in matrices:
            self.matrices[index].append(matrix)
            matrix.changed = self._released_if(index)
        self.reader = _Reader(self.matrices)
        self.blocks = blocks
        # the blocks' own, which do not load anything
        self.forwards = [block.forward for block in blocks]
        self._wrap()
        _hosted[model] = self

    def load(self, index: int) -> None:
        """Bring a block's matrices, in place of another's."""
        if self.loaded == index:
            return
        following = index + 1 if self.loaded is None else 2 * index - self.loaded  # in the same direction
        self.release()
        with self._as_outside_of_passes():
            self.reader.wait()
            for matrix in self.matrices[index]:
                matrix.load()
            self.reader.read(following)
        self.loaded = index

    def release(self) -> None:
        """Leave no block's matrices on the GPU."""
        for matrix in () if self.loaded is None else self.matrices[self.loaded]:
            matrix.release()
        self.loaded = None

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """Blocks bring no matrices while the context lasts, and none are there: someone else fills the parameters."""
        self.release()
        for block, forward in zip(self.blocks, self.forwards, strict=True):
            block.forward = forward
        try:
            yield
        finally:
            self._wrap()

    def _wrap(self) -> None:
        for index, (block, forward) in enumerate(zip(self.blocks, self.forwards, strict=True)):
            block.forward = self._loading(index, forward)

    def _loading(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.load(index)
            return forward(*args, **kwargs)

        return run

    def _released_if(self, index: int) -> Callable[[], None]:
        def changed() -> None:
            if self.loaded == index:
                self.release()

        return changed

    @contextmanager
    def _as_outside_of_passes(self) -> Iterator[None]:
        """A matrix does not depend on the pass that asks for it: its precision, autocast, or mode of inference."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.precision)
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.autocast("cuda", enabled=False):
                yield
        finally:
            torch.set_float32_matmul_precision(before)


class _Reader:
    """Reads the sources of one block ahead, where they are tensors, into memory that is pinned where there is a GPU.

    The weight files may lie on a disk, and a GPU copies from pageable memory at a fraction of its speed.
    """

    def __init__(self, matrices: Sequence[Sequence[HostedMatrix]]) -> None:
        self.matrices = matrices
        self.thread = ThreadPoolExecutor(1)
        self.reading: Future[None] | None = None
        self.read_ahead: Sequence[HostedMatrix] = ()
        self.memory: Tensor | None = None

    def read(self, block: int) -> None:
        """Begin with the block's sources; those of the block before are overwritten."""
        self.wait()
        for matrix in self.read_ahead:
            matrix.ahead = None
        self.read_ahead = self.matrices[block] if 0 <= block < len(self.matrices) else ()
        if self.memory is None:  # not by the thread, for which another GPU may be the current one
            most = max(sum(matrix.stored.nbytes for matrix in members) for members in self.matrices)
            on_gpu = any(matrix.device.type == "cuda" for members in self.matrices for matrix in members)
            self.memory = torch.empty(most, dtype=torch.uint8, pin_memory=on_gpu)
        self.reading = self.thread.submit(self._read, self.memory, self.read_ahead)

    def wait(self) -> None:
        """Return once what was begun has been read."""
        reading, self.reading = self.reading, None
        if reading is not None:
            reading.result()

    @torch.no_grad()
    def _read(self, memory: Tensor, matrices: Sequence[HostedMatrix]) -> None:
        start = 0
        for matrix in matrices:
            source, stored = matrix.source, matrix.stored
            if isinstance(source, Tensor) and source.dtype == stored.dtype:
                # in the parameter's layout, so that it is copied to the GPU as one piece
                copy = memory[start : start + stored.nbytes].view(stored.dtype).view(stored.shape)
                matrix.ahead = source, matrix.oriented(copy.copy_(matrix.oriented(source)))
                start += stored.nbytes


_hosted: WeakKeyDictionary[nn.Module, HostedBlocks] = WeakKeyDictionary()


def hosted_blocks(model: nn.Module) -> HostedBlocks | None:
    """The blocks of a model whose matrices are on the host; None for any other model."""
    return _hosted.get(model)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict as it was loaded, with tensors of the host in place of placeholders."""
    state, hosted = model.state_dict(), hosted_blocks(model)
    for matrices in () if hosted is None else hosted.matrices:
        state |= {f"{matrix.name}.weight": matrix.stored for matrix in matrices}
    return state
