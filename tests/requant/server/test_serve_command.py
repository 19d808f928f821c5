"""`requant serve` as a person starts and stops it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from requant.extras import requirement

pytest.importorskip("fastapi")

from requant.server.run import _bound


def start(*arguments: object, **environment: str) -> tuple[subprocess.Popen, str, str]:
    """The process, its address, and what it said before it served."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from requant.cli import main; main()",
            "serve",
            *map(str, arguments),
            "--port",
            "0",
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"serving (\S+) on (http://\S+)/v1", line):
            return process, found.group(2), said
    process.wait()
    raise AssertionError(said)


def post(address: str, body: dict, key: str = "") -> urllib.request.Request:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode(), headers)


def test_serve_a_checkpoint_and_stop_it(pristine_checkpoint: Path) -> None:
    """The checksum line, the key from the environment, and SIGTERM in the middle of a stream: exit code 0."""
    process, address, said = start(pristine_checkpoint, "--device", "cpu", REQUANT_API_KEY="secret")
    try:
        assert re.search(r"loaded 14 quantized matrices from .*, sha256 [0-9a-f]{8} as saved", said)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(post(address, {"prompt": "a"}))
        body = {"prompt": "a", "max_tokens": 3}
        answer = json.loads(urllib.request.urlopen(post(address, body, "secret")).read())
        assert answer["usage"]["completion_tokens"] <= 3 and answer["model"] == pristine_checkpoint.name
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "requant: stopped" in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_a_stream() -> None:
    process, address, said = start("demo", "--device", "cpu", "--quiet", "--max-tokens-limit", 400)
    try:
        assert "everybody" not in said
        stream = urllib.request.urlopen(post(address, {"prompt": "The", "max_tokens": 400, "stream": True}))
        stream.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        rest = stream.read().decode()
        assert process.wait(20) == 0 and time.monotonic() - began < 10
        assert "shutting_down" in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_what_cannot_be_served(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, error = cli("serve", "demo", "--port", taken.getsockname()[1])
        assert code == 2 and "cannot be served on" in error and "choose another --port" in error
    # bound by another server that does not listen yet: known only once this one has loaded its model
    with _bound("127.0.0.1", 0) as quicker, monkeypatch.context() as patch:
        patch.setattr("requant.server.run.open_served", lambda *_, **__: quicker.listen())
        patch.setattr("requant.server.run.Engine", MagicMock())
        patch.setattr("requant.server.app.create_app", MagicMock())
        code, _, error = cli("serve", "demo", "--port", quicker.getsockname()[1])
        assert code == 2 and "Address already in use); choose another --port" in error
    code, _, error = cli("serve", "demo", "--host", "a" * 300)
    assert code == 2 and "cannot be served on" in error and "Traceback" not in error
    code, _, error = cli("serve", "demo", "--context", 512, "--max-tokens-limit", 512)
    assert code == 2 and "leaves no room for a prompt in a context of 512" in error
    code, _, error = cli("serve", "demo", "--max-tokens-limit", 2048)
    assert code == 2 and error.endswith("in a context of 2048 tokens; lower it.\n")  # all that the model has
    code, _, error = cli("serve", "demo", "--context", 9999)
    assert code == 2 and "9999 tokens exceed the model's 2048 positions; lower it" in error
    for option in ("--api-key", "--name", "--host"):
        code, _, error = cli("serve", "demo", option, " ")
        assert code == 2 and f"{option} is empty" in error
    code, _, error = cli("serve", tmp_path)
    assert code == 2 and "no config.json" in error
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, error = cli("serve", "demo")
    assert code == 2 and f"pip install {requirement('serve')}" in error
