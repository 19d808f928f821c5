"""What a trellis is made in, by the tensors that live at once, against `calibration.collect.working_bytes`."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from requant.calibration.collect import working_bytes
from requant.calibration.stats import LinearStats
from requant.models.targets import QuantTarget
from requant.quantizers import block_ldlq, trellis

NEEDS = frozenset({"hessian", "output_hessian"})


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made in the context that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        return out

    def freed(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize(("n", "k"), [(256, 1024), (1024, 256), (1024, 1024)])
@pytest.mark.parametrize("what", ["codes", "losses"])
def test_a_trellis_is_made_in_the_bytes_that_are_kept_free_for_it(
    n: int, k: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search has memory of its own, of one anti-diagonal of tiles; wide layers are what counts here."""
    monkeypatch.setattr(block_ldlq, "AT_ONCE", 2**14)
    monkeypatch.setattr(
        block_ldlq, "code_tiles", lambda tiles, values, bits: (tiles.to(torch.uint8), tiles.clone())
    )
    stats = LinearStats(hessian=torch.eye(k) + 0.1, output_hessian=torch.eye(n) + 0.1)
    weight, config = torch.randn(n, k), trellis.TrellisConfig(bits=2)
    with LiveBytes() as live:
        if what == "codes":
            trellis.quantize(weight, stats, config)
        else:
            trellis.predicted_losses(weight, stats, config, [2])
    linear = torch.nn.Linear(k, n, bias=False)
    target = QuantTarget(name="linear", kind="linear", block=0, module=linear, transposed=False)
    expected = working_bytes(target, NEEDS)
    assert 0.6 * expected < live.most < 1.05 * expected


def test_factors_of_wide_hessians_are_those_of_narrow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces change nothing of the factor, and of the trace the order of a sum in double precision."""
    x = torch.randn(600, 192, generator=torch.Generator().manual_seed(0))
    hessian = x.T @ x / len(x)
    whole = block_ldlq.block_ldl(hessian, damp=0.01)
    expected = trellis.white_trace(hessian, damp=0.01)
    monkeypatch.setattr(block_ldlq, "AT_ONCE", 192 * 32)
    pieces = block_ldlq.block_ldl(hessian, damp=0.01)
    assert torch.equal(pieces, whole)
    assert trellis.white_trace(hessian, damp=0.01) == pytest.approx(expected, rel=1e-6)
