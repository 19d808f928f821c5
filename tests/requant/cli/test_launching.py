"""`--gpus`: the process that starts the others is light, says what is wrong once, and ends all with a signal."""

import signal
import subprocess
import sys
from pathlib import Path
from time import sleep

import psutil
import pytest

from requant.cli import launching
from requant.errors import InputError


def test_gpus_that_cannot_be_had(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(InputError, match=r"^--gpus 2: torch sees 1 GPUs here; lower it\.$"):
        launching.check_gpus(2, "cuda")
    launching.check_gpus(2, "cpu")
    with pytest.raises(
        InputError, match=r"^--gpus 2: torch sees 0 GPUs here; .* give --device cpu for as many"
    ):
        launching.check_gpus(2, "cpu", gpus=2, asked="auto")
    launching.check_gpus(2, "cpu", gpus=2, asked="cpu")
    launching.check_gpus(1, "cpu", gpus=1, asked="auto")
    launching.check_gpus(2, "cpu", asked="auto")  # of torchrun
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(InputError, match=r"^--gpus 3 in one of 2 processes of torchrun"):
        launching.ran_on(3, "cpu")
    monkeypatch.setenv("RANK", "1")
    assert not launching.ran_on(3, "cpu")  # the first says so
    monkeypatch.delenv("WORLD_SIZE")
    command = ["quantize", "--bits", "3", "--gpus", "2", "--output", tmp_path / "out"]
    assert "give --device cuda, or CUDA_VISIBLE_DEVICES" in cli(*command, "--device", "cuda:0")[2]


def test_the_process_that_starts_the_others_imports_no_torch(tmp_path: Path) -> None:
    """Which would take seconds before they begin. What is wrong with a command the first of them says, once."""
    wrong = ("quantize", "--model", "demo", "--bits", "17", "--device", "cpu", "--gpus", "2")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "requant", *wrong, "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "requant.cli.launching" in imported
    assert {name.split(".")[0] for name in imported} & {"torch", "numpy", "transformers", "scipy"} == set()
    assert len(imported) < 500
    said = [line for line in done.stderr.splitlines() if "|" not in line]
    assert said == ["requant: --bits 17 is out of range; give 1 to 8, like 3 or 2.25."]
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 1, "requant: ended by SIGTERM; `requant quantize --resume`, "),
        (signal.SIGINT, 130, "requant: interrupted; the same command with --resume "),
    ],
)
def test_a_signal_ends_all_processes(tmp_path: Path, number: signal.Signals, code: int, said: str) -> None:
    command = ("quantize", "--model", "demo", "--bits", "3", "--device", "cpu", "--gpus", "2", "--output")
    run = subprocess.Popen(
        [sys.executable, "-m", "requant", *command, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(started := psutil.Process(run.pid).children()) < 2 and run.poll() is None:
        sleep(0.01)
    run.send_signal(number)
    out, error = run.communicate(timeout=60)
    assert (run.returncode, out) == (code, "")
    assert error.startswith(said) and error.count("\n") == 1
    assert not any(each.is_running() for each in started)
