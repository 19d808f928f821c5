"""Runs that fail or are stopped: memory, disk, a signal, a bug; what is kept, and with which exit code."""

import errno
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from requant.cli import COMMANDS
from requant.errors import ModelError

pytestmark = pytest.mark.usefixtures("elsewhere")

TINY = ("--num-samples", 2, "--seq-len", 64, "--quiet")


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
    ],
)
@pytest.mark.parametrize(
    "where", ["requant.pipeline.preparation.open_model.load_model", "requant.pipeline.quantize.diagnose"]
)
def test_out_of_memory(
    cli, tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch, failure, where: str
) -> None:
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(where, fail)
    code, out, error = cli(
        "quantize", "--model", tiny_folder("llama"), "--bits", 3, "--method", "rtn", "--mode", "dense",
        "--calibration", tiny_text_file, "--output", "out", *TINY
    )  # fmt: skip
    assert (code, out) == (1, "") and not (tmp_path / "out").exists()
    assert error.startswith(
        "requant: memory is exhausted; lower --seq-len or --num-samples, use --dtype bfloat16"
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_out_of_memory_names_options_that_the_command_has(cli, monkeypatch, command: str) -> None:
    def fail(*args, **kwargs):
        raise MemoryError

    options = set(re.findall(r"--[a-z-]+", cli(command, "--help")[1]))
    monkeypatch.setattr("requant.cli.app", fail)
    code, out, error = cli(command)
    assert (code, out) == (1, "") and error.startswith("requant: memory is exhausted; ")
    assert set(re.findall(r"--[a-z-]+", error)) <= options


def test_memory_that_runs_out_inside_transformers(cli, monkeypatch) -> None:
    """Its loader wraps what it meets; ours must not call that a damaged model."""

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    code, _, error = cli("quantize", "--bits", 3, *TINY)
    assert code == 1 and error.startswith("requant: memory is exhausted")


@pytest.mark.parametrize(
    "name",
    [
        "requant.run.workspace.write_as_made",
        pytest.param("requant.checkpoint.writer.write_safetensors", marks=pytest.mark.slow),
        "requant.checkpoint.save.write_bytes",
    ],
)
def test_disk_full(cli, tiny_folder, tiny_text_file: Path, tmp_path: Path, monkeypatch, name: str) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    arguments = (
        "quantize", "--model", tiny_folder("llama"), "--bits", 3, "--method", "gptq", "--mode", "dense",
        "--calibration", tiny_text_file, "--output", "out", *TINY
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(name, full)
        code, out, error = cli(*arguments)
    assert (code, out) == (1, "") and not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))
    assert error.count("\n") == 1 and "free some space and run again with --resume." in error
    if name.startswith("requant.checkpoint"):  # as it says: nothing is quantized twice
        monkeypatch.setattr("requant.run.workspace.write_as_made", full)
    code, _, error = cli(*arguments, "--resume")
    assert code == 0 and (tmp_path / "out" / "config.json").is_file(), error


def test_disk_full_anywhere_else(cli, monkeypatch) -> None:
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device", "some/file")

    monkeypatch.setattr("requant.pipeline.preparation.texts.overlap", full)
    code, _, error = cli("quantize", "--bits", 3, *TINY)
    again = "free some space and run again with --resume."
    assert code == 1 and error == f"requant: the disk is full (some/file); {again}\n"
    code, _, error = cli("quantize", "--bits", 3, "--dry-run", *TINY)
    assert code == 1 and error == "requant: the disk is full (some/file); free some space.\n"


def test_sigterm_ends_a_run_as_ctrl_c_does(
    cli, tiny_folder, tiny_text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    arguments = (
        "quantize", "--model", tiny_folder("llama"), "--bits", 3, "--mode", "dense", "--method", "gptq",
        "--calibration", tiny_text_file, "--output", "out", *TINY
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(
            "requant.pipeline.quantize.diagnose", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
        )
        code, _, error = cli(*arguments)
    assert code == 130 and "--resume continues where it stopped" in error
    assert signal.getsignal(signal.SIGTERM) == before and list(Path("out.partial").glob("linear-*"))
    code, _, error = cli(*arguments, "--resume")
    assert code == 0, error


def test_a_bug_keeps_its_traceback(cli, monkeypatch) -> None:
    def bug(*args, **kwargs):
        raise RuntimeError("size mismatch")

    monkeypatch.setattr("requant.pipeline.preparation.texts.overlap", bug)
    with pytest.raises(RuntimeError, match="size mismatch"):
        cli("quantize", "--bits", 3, *TINY)


@pytest.mark.parametrize("kind", [ImportError, ModelError])
def test_an_interrupt_that_a_module_calls_a_failed_import(
    cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[Exception]
) -> None:
    """As numpy's and others' compiled ones do where Ctrl-C comes while they are imported."""

    def imported(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise kind("initialization failed") from error

    monkeypatch.setattr("requant.exporters.export.export", imported)
    before = signal.getsignal(signal.SIGINT)
    assert cli("export", "a", "--to", "dense", "--output", tmp_path / "b") == (
        130,
        "",
        "requant: interrupted.\n",
    )
    assert signal.getsignal(signal.SIGINT) is before
