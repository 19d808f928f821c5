"""Several processes of one run, over gloo on the CPU: who does what, and what comes out."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from requant import ranks
from requant.recipe.schema import Budget, Calibration, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import dump_recipe

COLLECTIVES = """
import json, sys
import torch
from requant import ranks

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

    big, small = torch.full((ranks.BUCKET + 5,), 2.0**-me), torch.tensor([[1e8, 1.0, -1e8][me]])
    ranks.sum_over_ranks([big, small])
    found["sums"] = [big.unique().tolist(), small.tolist()]

    used = []
    def use(name, *parts):
        used.append((name, [part.tolist() for part in parts], id(parts[0])))
    exchange = ranks.Exchange({"a": 2, "b": 0, "c": 2}, use)
    if me < 2:  # rank 2 has no batch in this round, rank 1 nothing to say about b
        x = torch.full((me + 1, 1), float(me), requires_grad=True)
        exchange.give("a", x)
        if me == 0:
            exchange.give("b", x, torch.ones(1, dtype=torch.bfloat16))
        exchange.give("c", x)
    exchange.deliver()
    exchange.deliver()
    found["used"] = [(name, values) for name, values, _ in used]
    found["one object"] = len({place for _, _, place in used})
    print("nobody but rank 0 prints")
    print(json.dumps(found), file=out)
"""


def test_collective_operations(tmp_path: Path) -> None:
    """Three processes; each claim is counted by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", COLLECTIVES],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    lines = [out.splitlines() for out, _ in outputs]
    assert [len(each) for each in lines] == [2, 1, 1]  # of rank 0 also what it printed
    found = [json.loads(each[-1]) for each in lines]
    assert [each.pop("rounds") for each in found] == [[0, 3, 6], [1, 4, None], [2, 5, None]]
    used, objects = ([each.pop(key) for each in found] for key in ("used", "one object"))
    assert found[0] == found[1] == found[2]
    assert found[0] == {
        "size": 3,
        "merged": [0, 10, 20, 30, 40, 50, 60],
        "tensors": [[0, 0], [1, 1]],
        "of_all": [["a", "aa"], ["b", "bb"], ["c", "cc"]],
        "shared": {"x": 0.1},
        "smallest": 3,
        "agree": [True, False],
        # (1e8 + 1) - 1e8 in the order of ranks, in float32; another order would leave 1
        "sums": [[1.75], [0.0]],
    }
    assert used[0] == [["b", [[[0.0]], [1.0]]]]
    assert used[1] == []
    assert used[2] == [["a", [[[0.0]]]], ["c", [[[0.0]]]], ["a", [[[1.0], [1.0]]]], ["c", [[[1.0], [1.0]]]]]
    assert objects == [1, 0, 2]


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
    exchange = ranks.Exchange({"a": 0}, lambda *arguments: calls.append(arguments))
    tensor = ranks.torch.ones(1)
    exchange.give("a", tensor)
    assert calls == [("a", tensor)]
    assert ranks.rounds([1, 2]) == [1, 2] and ranks.merged([1, 2]) == [1, 2]
    assert ranks.shared(1, {"t": tensor})[1]["t"] is tensor


def test_gpus_that_cannot_be_had(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = ["quantize", "--bits", "3", "--gpus", "2", "--output", tmp_path / "out"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    code, out, error = cli(*command, "--device", "cuda")
    assert (code, out) == (2, "")
    assert error == "requant: --gpus 2: torch sees 1 GPUs here; lower it.\n"
    assert "give --device cuda, or CUDA_VISIBLE_DEVICES" in cli(*command, "--device", "cuda:0")[2]


@pytest.mark.slow
def test_training_on_two_processes(cli, tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    """Gradients are summed in another order: not the same bytes, but the same quality, and the same bytes every time."""
    recipe = Recipe(
        model=str(tiny_folder("llama")),
        mode="best",
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=16, seq_len=32),
        evaluation=Evaluation(context=32, windows=7),
        budget=Budget(bits=3.5),
        finetune=Finetune(steps=5, tokens_per_step=128, val_windows=2, eval_every=2),
    )
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    command = ["quantize", "--recipe", str(tmp_path / "recipe.yaml"), "--quiet", "--output"]
    assert cli(*command, tmp_path / "one")[0] == 0
    for name in ("two", "again"):
        done = subprocess.run(
            [sys.executable, "-m", "requant", *command, str(tmp_path / name), "--gpus", "2"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "two/model.safetensors").read_bytes() == (
        tmp_path / "again/model.safetensors"
    ).read_bytes()
    one, two = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("one", "two"))
    assert two["after"]["mean_kl"] == pytest.approx(one["after"]["mean_kl"], rel=0.02)
