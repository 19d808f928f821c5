"""`--push-to-hub`, against a local server that answers as the hub's HTTP API does."""

import base64
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

pytestmark = pytest.mark.filterwarnings(
    "ignore:Use .content="
)  # huggingface_hub sends files by an older name
TINY = (
    "--code-bits",
    4,
    "--method",
    "rtn",
    "--mode",
    "dense",
    "--num-samples",
    2,
    "--seq-len",
    32,
    "--quiet",
)


class FakeHub(BaseHTTPRequestHandler):
    """whoami, create, preupload, LFS batch and upload, commit; what is asked and kept lies in the server."""

    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer hf_token"
        if self.path.endswith("/whoami-v2"):
            self.server.asked += 1
            token = {"accessToken": {"role": self.server.role}}
            who = {"name": "someone", "type": "user", "auth": token}
            self.answer(who if known else {"error": "no"}, 200 if known else 401)
        else:
            self.answer({"error": "not found"}, 404)

    def do_PUT(self) -> None:
        self.server.objects[self.path.rsplit("/", 1)[-1]] = self.body()
        self.answer({})

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        if self.path.endswith("/repos/create"):
            hub.created = json.loads(body)
            self.answer({"url": f"{hub.url}/someone/tiny"})
        elif self.path.endswith("/api/validate-yaml"):  # of the model card
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular"}
                for f in files
            ]
            self.answer({"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.url}/storage/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path and not hub.full:
            for line in map(json.loads, body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            self.answer({"commitUrl": f"{hub.url}/someone/tiny/commit/1", "commitOid": "1", "hookOutput": ""})
        else:
            self.answer({"error": "storage is full"}, 403)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    server.files, server.objects, server.created, server.full = {}, {}, None, False
    server.asked, server.role = 0, "write"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def arguments(folder: Path, text: Path, repo: str) -> tuple[Any, ...]:
    return (
        "quantize", "--model", folder, "--calibration", text, "--output", "out", "--push-to-hub", repo, *TINY
    )  # fmt: skip


def test_the_repository_holds_the_folder_and_says_what_it_is(cli, hub, tiny_folder, tiny_text_file) -> None:
    source = tiny_folder("llama")
    (source / "README.md").write_text(
        "---\nlicense: llama3.2\nlanguage: [en, de]\nbase_model: x\n---\n# Tiny\n"
    )
    try:
        code, _, error = cli(*arguments(source, tiny_text_file, "someone/tiny"))
    finally:
        (source / "README.md").unlink()
    assert code == 0, error
    assert f"pushed to {hub.url}/someone/tiny" in error
    assert hub.created["name"] == "tiny" and hub.created["organization"] == "someone"
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    written = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert hub.files == written and "model.safetensors" in written
    card = hub.files["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "llama3.2" and front["language"] == ["en", "de"]
    assert front["library_name"] == "requant" and "4-bit" in front["tags"]


@pytest.mark.parametrize(
    ("repo", "token", "sentence"),
    [
        ("tiny", "hf_token", "has no owner; give OWNER/NAME"),
        ("a/b/c", "hf_token", "is not the name of a repository"),
        ("someone/tiny", "hf_other", "the hub does not know who you are .*hf auth login"),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_the_run(
    cli, hub, tiny_folder, tiny_text_file, monkeypatch, repo: str, token: str, sentence: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    code, _, error = cli(*arguments(tiny_folder("llama"), tiny_text_file, repo))
    assert code == 2 and re.search(sentence, error) and "Traceback" not in error
    assert not Path("out").exists() and hub.created is None


def test_a_token_that_may_only_read_is_refused(cli, hub, tiny_folder, tiny_text_file) -> None:
    hub.role = "read"
    code, _, error = cli(*arguments(tiny_folder("llama"), tiny_text_file, "someone/tiny"))
    assert (
        code == 2 and "the token of someone may only read, so nothing can be pushed to someone/tiny" in error
    )
    assert not Path("out").exists() and hub.created is None


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("repo", "offline", "token", "sentence"),
    [
        ("tiny", False, "hf_token", "--push-to-hub tiny has no owner; give OWNER/NAME"),
        ("some one/tiny", False, "hf_token", "is not the name of a repository"),
        ("someone/tiny", True, "hf_token", "which HF_HUB_OFFLINE switches off; unset that"),
        ("someone/tiny", False, None, "nobody is logged in here; run `hf auth login`, set HF_TOKEN"),
    ],
)
def test_what_needs_no_network_is_checked_first(
    cli,
    hub,
    tiny_text_file,
    monkeypatch,
    repo: str,
    offline: bool,
    token: str | None,
    sentence: str,
    dry_run: bool,
) -> None:
    """Before the model is looked for: there is none here."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    words = arguments(Path("no-model"), tiny_text_file, repo)
    code, out, error = cli(*words, *(["--dry-run"] if dry_run else []))
    assert (code, out) == (2, "") and sentence in error and error.count("\n") == 1
    assert hub.asked == 0


def test_a_dry_run_asks_nobody(cli, hub, tiny_folder, tiny_text_file) -> None:
    code, out, error = cli(*arguments(tiny_folder("llama"), tiny_text_file, "someone/tiny"), "--dry-run")
    assert code == 0 and "output          out" in out, error
    assert hub.asked == 0


def test_a_push_that_fails_leaves_the_checkpoint(cli, hub, tiny_folder, tiny_text_file) -> None:
    hub.full = True
    code, _, error = cli(*arguments(tiny_folder("llama"), tiny_text_file, "someone/tiny"))
    assert code == 1 and "out is finished, but did not reach the hub" in error
    assert "`hf upload someone/tiny out`" in error and (Path("out") / "model.safetensors").is_file()
