"""Several processes of one run, over gloo on the CPU: who does what, and what they tell each other."""

import json
import sys

import pytest
import torch
import torch.distributed as dist

from requant import ranks
from requant.calibration.exchange import Exchange
from requant.calibration.stats import Curvature
from requant.finetune import divided
from requant.quantizers import block_ldlq, table_trellis

COLLECTIVES = """
import json, sys
import torch
from requant import ranks
from requant.calibration import exchange as exchange_module
from requant.calibration.exchange import Exchange
from requant.calibration.stats import Curvature
from requant.finetune import divided
from requant.quantizers import block_ldlq, table_trellis

USES = [Curvature(rows=torch.ones(96), covariance=torch.eye(16))]

class Target:
    def __init__(self, name, rank): self.name, self.rank = name, rank

with ranks.joined("cpu"):
    me = ranks.rank()
    out = sys.__stdout__
    found = {"size": ranks.world_size(), "rounds": ranks.rounds(list(range(7)))}
    found["merged"] = ranks.merged([10 * i for i in ranks.mine(range(7))])
    tensors = ranks.merged_tensors([torch.full((2,), i) for i in ranks.mine(range(2))])
    found["tensors"] = [t.tolist() for t in tensors]
    targets = [Target("a", 2), Target("b", 0), Target("c", 2)]
    found["of_all"] = list(ranks.of_all(targets, {t.name: t.name * 2 for t in ranks.owned(targets)}).items())
    found["shared"] = ranks.shared({"x": 0.1} if me == 1 else None, {"t": torch.ones(2)} if me == 1 else {}, source=1)[0]
    found["smallest"] = ranks.smallest(5 - me)
    found["agree"] = [ranks.all_agree(me < 3), ranks.all_agree(me < 2)]

    big, small = torch.full((divided.ALONE_FROM + 5,), 2.0**-me), torch.full((2, 3), 2.0**-me)
    rounded = torch.rand(1000, generator=torch.Generator().manual_seed(me))
    again = rounded.clone()
    for tensors in ([big, small], [rounded], [again]):
        divided.sum_over_ranks(tensors)
    found["sums"] = [big.unique().tolist(), small.tolist()]
    big, small = torch.full((divided.ALONE_FROM,), 1 + 2.0**-10), torch.full((2, 3), 1 + 2.0**-10)
    divided.started_sum([small, big], torch.bfloat16)()
    found["rounded sums"] = [big.unique().tolist(), small.unique().tolist(), str(big.dtype)]
    found["the same every time"] = torch.equal(rounded, again)
    found["rounded"] = rounded.tolist()  # the same on every rank

    rows = divided.rows_of_all(torch.full((me, 2), float(me)), [0, 1, 2])
    found["rows of all"] = [each.tolist() for each in rows]

    matrix = torch.arange(1, 8).float().view(7, 1)  # no multiple of three
    part = divided.Part.of(matrix)
    found["part"] = part.elements.tolist()
    found["whole"] = [torch.equal(part.whole(), matrix), part.whole(torch.bfloat16).dtype == torch.bfloat16, part.nbytes]
    found["part of a sum"] = divided.Part.of_sum(matrix * [1e8, 1.0, -1e8][me]).elements.tolist()

    table_trellis.WEIGHTS_AT_ONCE = 512  # two rows of tiles: a piece of the table for each
    block_ldlq.block_ldlq = lambda target, across, **_: (target > 0).to(torch.uint8)  # a search takes seconds to compile
    table = table_trellis.quantize(torch.randn(96, 16, generator=torch.Generator().manual_seed(0)), USES, 2)
    found["codes of a table"] = table.dense.codes.sum(1).tolist()

    used = []
    def use(name, *parts):
        used.append((name, [part.tolist() for part in parts], id(parts[0])))
    exchange = Exchange({"a": 2, "b": 0, "c": 2}, use)
    if me < 2:  # rank 2 has no batch in this round, rank 1 nothing to say about b
        x = torch.full((me + 1, 1), float(me), requires_grad=True)
        exchange.give("a", x)
        if me == 0:
            exchange.give("b", x, torch.ones(1, dtype=torch.bfloat16))
        exchange.give("c", x)
    exchange.deliver()
    exchange.deliver()
    exchange_module.AT_ONCE = 1  # every matrix alone, but for those that share a tensor, and what is given between them
    sent = []
    exchange = Exchange({"a": 2, "b": 0, "c": 2, "d": 2}, use)
    plain = exchange._deliver
    exchange._deliver = lambda names, *rest: (sent.append(sorted(names)), plain(names, *rest))
    start = len(used)
    for name, tensor in (("a", x := torch.full((2, 2), float(me))), ("b", x + 1), ("c", x), ("d", x.bfloat16())):
        exchange.give(name, tensor)
    exchange.deliver()
    found["sent"], found["used in groups"] = sent, [(name, values) for name, values, _ in used[start:]]
    del used[start:]
    found["used"] = [(name, values) for name, values, _ in used]
    found["one object"] = len({place for _, _, place in used})
    print("nobody but rank 0 prints")
    print(json.dumps(found), file=out)
"""


def test_collective_operations(monkeypatch: pytest.MonkeyPatch, in_processes) -> None:
    """Three processes; each claim is counted by hand."""
    lines = [out.splitlines() for out in in_processes(COLLECTIVES, 3)]
    assert [len(each) for each in lines] == [2, 1, 1]  # of rank 0 also what it printed
    found = [json.loads(each[-1]) for each in lines]
    assert [each.pop("rounds") for each in found] == [[0, 3, 6], [1, 4, None], [2, 5, None]]
    assert [each.pop("part") for each in found] == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 0.0, 0.0]]
    # x 1e8 + x - x 1e8 in float32, where the unit at 1e8 x is 8 to 64
    assert [each.pop("part of a sum") for each in found] == [
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0],
    ]
    weight = torch.randn(96, 16, generator=torch.Generator().manual_seed(0))
    uses = [Curvature(rows=torch.ones(96), covariance=torch.eye(16))]
    monkeypatch.setattr(block_ldlq, "block_ldlq", lambda target, across, **_: (target > 0).to(torch.uint8))
    alone = table_trellis.quantize(weight, uses, 2).dense.codes
    assert 0 < alone.sum() < alone.numel()
    assert found[0].pop("codes of a table") == alone.sum(1).tolist()
    assert found[1].pop("codes of a table") == found[2].pop("codes of a table") == alone.sum(1).tolist()
    assert len({tuple(each["rounded"]) for each in found}) == 1
    expected = sum(torch.rand(1000, generator=torch.Generator().manual_seed(i)) for i in range(3))
    for each in found:
        torch.testing.assert_close(torch.tensor(each.pop("rounded")), expected)
    used, objects = ([each.pop(key) for each in found] for key in ("used", "one object"))
    in_groups = [each.pop("used in groups") for each in found]
    assert in_groups[0] == [["b", [[[float(me + 1)] * 2] * 2]] for me in range(3)]
    squares = [[[[float(me)] * 2] * 2] for me in range(3)]
    assert in_groups[2] == [[name, squares[me]] for names in ("ac", "d") for me in range(3) for name in names]
    assert in_groups[1] == []
    assert found[0] == found[1] == found[2]
    assert found[0] == {
        "size": 3,
        "merged": [0, 10, 20, 30, 40, 50, 60],
        "tensors": [[0, 0], [1, 1]],
        "of_all": [["a", "aa"], ["b", "bb"], ["c", "cc"]],
        "shared": {"x": 0.1},
        "smallest": 3,
        "sent": [["a", "b", "c"], ["d"]],
        "agree": [True, False],
        "whole": [True, True, 28],
        "rows of all": [[], [[1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]],
        "sums": [[1.75], [[1.75] * 3] * 2],
        "rounded sums": [[3.0], [3 + 3 * 2.0**-10], "torch.float32"],
        "the same every time": True,
    }
    assert used[0] == [["b", [[[0.0]], [1.0]]]]
    assert used[1] == []
    assert used[2] == [["a", [[[0.0]]]], ["c", [[[0.0]]]], ["a", [[[1.0], [1.0]]]], ["c", [[[1.0], [1.0]]]]]
    assert objects == [1, 0, 2]


WARNINGS = """
import logging, sys
from requant import ranks
from requant.cli.common import log_to_stderr
from requant.processes import is_first

log_to_stderr(verbose=True)
logging.getLogger().handlers[0].setStream(sys.__stdout__)
logger = logging.getLogger("requant.here")
if is_first():
    logger.warning("of the recipe")
with ranks.joined("cpu"):
    if not is_first():
        logger.warning("of the recipe")
    logger.warning("of all")
    logger.info("a stage")
    if ranks.rank() == 1:
        logger.warning("of one")
    ranks.merged([])
logger.warning("at the end") if is_first() else None
"""


def test_what_several_processes_find_alike_is_said_once(in_processes) -> None:
    lines = [out.splitlines() for out in in_processes(WARNINGS, 3)]
    said = ["a stage", "at the end", "of all", "of one", "of the recipe"]
    assert sorted(line for each in lines for line in each) == [f"requant: {each}" for each in said]
    assert {"requant: a stage", "requant: of the recipe"} < set(lines[0]) and "requant: of one" in lines[1]


def test_large_tensors_are_added_up_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a dtype is given, which their sums are rounded to."""
    given: list[int] = []

    class Done:
        def wait(self) -> None:
            pass

    def all_reduce(tensor: torch.Tensor, async_op: bool = False) -> Done:
        given.append(tensor.data_ptr())
        tensor.mul_(3)  # the others have twice as much
        return Done()

    monkeypatch.setattr(ranks, "world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    large, one, two = torch.ones(divided.ALONE_FROM), torch.ones(2, 3), torch.full((1,), 2.0)
    divided.sum_over_ranks([one, large, two])
    assert divided.in_parts([one, large, two], 2) == [slice(0, 2), slice(2, 3)]
    assert divided.in_parts([one, two, two], 8) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert large.unique().tolist() == one.unique().tolist() == [3.0] and two.tolist() == [6.0]
    assert len(given) == 2 and given[0] == large.data_ptr()
    for dtype, expected in ((torch.float32, 3 + 3 * 2.0**-10), (torch.bfloat16, 3.0)):
        given.clear()
        large.fill_(1 + 2.0**-10)
        finish = divided.started_sum([large], dtype)
        assert (given[0] == large.data_ptr()) == (dtype == torch.float32)
        finish()
        assert large.unique().tolist() == [expected]


PARTED = """
import importlib, sys, threading
from pathlib import Path
import torch
import torch.distributed as dist
from requant import ranks

def threads():
    names = [each.read_text().strip() for each in Path("/proc/self/task").glob("*/comm")]
    return sorted(name for name in names if "gloo" in name)

connect, imported = dist.init_process_group, threading.Event()

def connecting(*args, **kwargs):
    assert imported.wait(100), "imports wait until the ranks have connected"
    connect(*args, **kwargs)

def imports():
    importlib.import_module("requant.pipeline.quantize")
    imported.set()

dist.init_process_group = connecting
with ranks.joined("cpu", meanwhile=imports):
    assert imported.is_set() and ranks.all_agree(True)
    torch.optim.Adam([torch.ones(1, requires_grad=True)])  # imports much, of which something may keep the group
    print(threads(), file=sys.__stdout__)
print(threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are in /proc")
def test_no_thread_of_gloo_is_left_when_ranks_have_parted(in_processes) -> None:
    """One that frees a tensor as the interpreter ends would abort the process; and imports wait for no other rank."""
    for out in in_processes(PARTED, 2):
        before, after = out.splitlines()
        assert "pt_gloo_runloop" in before
        assert after == "[]"


def test_matrices_are_divided_by_kind_and_by_size() -> None:
    blocks = [[("q", 16), ("k", 4), ("v", 4), ("gate", 56), ("up", 56), ("down", 56)] for _ in range(8)]
    matrices = [matrix for block in blocks for matrix in block]
    owners = ranks.owners(matrices, 4)
    for kind in ("q", "k", "v", "gate", "up", "down"):
        of_kind = [owner for (name, _), owner in zip(matrices, owners, strict=True) if name == kind]
        assert sorted(of_kind) == sorted(2 * [0, 1, 2, 3])
    first = owners[:6]
    assert len({*first[3:]}) == 3  # the large ones of a block, which sequential calibration quantizes alone
    assert ranks.owners(matrices, 1) == [0] * len(matrices)


def test_alone_nothing_is_sent() -> None:
    calls: list[tuple[object, ...]] = []
    exchange = Exchange({"a": 0}, lambda *arguments: calls.append(arguments))
    tensor = ranks.torch.ones(1)
    exchange.give("a", tensor)
    assert calls == [("a", tensor)]
    assert ranks.rounds([1, 2]) == [1, 2] and ranks.merged([1, 2]) == [1, 2]
    assert ranks.shared(1, {"t": tensor})[1]["t"] is tensor
