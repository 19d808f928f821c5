"""`--gpus N`: processes that are started, and ended together."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from requant.cli import launching
from requant.errors import RequantError


def sleeper(folder: Path) -> str:
    """A program that starts another one, and ends long after any test."""
    file = folder / "sleeper"
    file.write_text("#!/bin/sh\nsleep 300 &\nsleep 300\n")
    file.chmod(0o755)
    return str(file)


def started(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True)


def sleeping(parent: psutil.Process, count: int) -> list[psutil.Process]:
    """The `sleep`s among what a process started, once there are so many."""
    until, found = time.monotonic() + 20, []
    while time.monotonic() < until:
        found = [each for each in parent.children(recursive=True) if each.name() == "sleep"]
        if len(found) == count:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{len(found)} of {count} processes")


def test_all_end_well_or_the_code_is_that_of_one_that_failed(capfd) -> None:
    launching._launch(2, ["--version"])
    assert capfd.readouterr().out.count("requant ") == 2
    with pytest.raises(SystemExit) as ended:
        launching._launch(2, ["no-such-command"])
    assert ended.value.code == 2


def test_each_process_has_its_rank_and_all_meet_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        first, second = launching._environments(2, meeting)
        port = meeting.getsockname()[1]
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"], second["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"] == str(port) and first["OMP_NUM_THREADS"] == "3"


def test_those_that_are_left_end_with_what_they_started(tmp_path: Path) -> None:
    failing, other = started("false"), started(sleeper(tmp_path))
    left = sleeping(psutil.Process(other.pid), 2)
    assert launching._first_to_fail([other, failing]) == (1, 1)
    launching._end([failing, other], signal.SIGTERM)
    assert other.poll() == -signal.SIGTERM
    assert psutil.wait_procs(left, timeout=10)[1] == []


def test_one_that_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(sleeper(tmp_path))
    file.write_text("#!/bin/sh\ntrap '' TERM\nsleep 300\n")
    deaf = started(str(file))
    sleeping(psutil.Process(deaf.pid), 1)
    monkeypatch.setattr(launching, "TO_END", 0.2)
    launching._end([deaf], signal.SIGTERM)
    assert deaf.poll() == -signal.SIGKILL


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_all(tmp_path: Path, sent: signal.Signals) -> None:
    code = f"""
import sys
from requant.cli import launching
from requant.errors import RequantError
sys.executable = {sleeper(tmp_path)!r}
try:
    launching._launch(2, [])
except (RequantError, KeyboardInterrupt) as error:
    print(type(error).__name__, error)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    left = sleeping(psutil.Process(run.pid), 4)
    run.send_signal(sent)
    said = run.communicate(timeout=60)[0].strip()
    expected = (
        "KeyboardInterrupt"
        if sent == signal.SIGINT
        else f"RequantError ended by SIGTERM; {launching.RESUMES}"
    )
    assert said == expected
    assert psutil.wait_procs(left, timeout=10)[1] == []


def test_a_process_that_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "killed"
    file.write_text('#!/bin/sh\n[ "$RANK" = 1 ] && kill -9 $$\nexec sleep 300\n')
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))
    with pytest.raises(RequantError, match="process 1 of 2 was killed by SIGKILL, which ends the run"):
        launching._launch(2, [])
