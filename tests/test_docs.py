"""The pages: links lead somewhere, commands and options exist, every error has its line."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

import requant.errors
from requant.cli import app
from requant.exporters.export import TARGETS
from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.readers import READERS
from requant.recipe.schema import Score

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CLASSES = {name for name in vars(requant.errors) if name.endswith("Error")}


def text_of(node: ast.AST) -> str:
    """The literal text of a message; `{}` where a value stands."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "{}"


def messages() -> list[tuple[str, str, str]]:
    """Class, place and text of every error that the package raises."""
    found: list[tuple[str, str, str]] = []
    for path in sorted((ROOT / "requant").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                message = text_of(node.args[0]) if node.args else ""
                if re.search("[a-z]{3}", message):  # else a sentence that was made elsewhere
                    found.append((node.func.id, f"{path.relative_to(ROOT)}:{node.lineno}", message))
    return found


def families() -> dict[str, list[str]]:
    """Class -> the phrases that the page explains."""
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        name = section.split(":")[0].split("\n")[0].strip()
        cells = re.findall(r"^\| ([^|]+) \|", section, flags=re.MULTILINE)
        found[name] = [phrase for cell in cells[2:] for phrase in re.findall(r"`([^`]+)`", cell)]
    return found


def test_every_error_has_a_line_on_the_page() -> None:
    known = families()
    assert known.keys() >= CLASSES - {"InputError"} and "InputError" in known
    missing = [
        f"{name} in {place}: {message}"
        for name, place, message in messages()
        if not any(phrase in message for phrase in known.get(name, []))
    ]
    assert missing == [], "name a phrase of it in docs/troubleshooting.md, with its remedy"


def test_every_error_ends_as_a_sentence() -> None:
    endless = [
        f"{name} in {place}: {message}"
        for name, place, message in messages()
        if not message.endswith((".", "?", "{}"))  # a value may hold its own end
    ]
    assert endless == []


def test_every_line_of_the_page_stands_for_an_error() -> None:
    by_class: dict[str, list[str]] = {}
    for name, _, message in messages():
        by_class.setdefault(name, []).append(message)
    stale = [
        f"{name}: {phrase}"
        for name, phrases in families().items()
        if name in CLASSES
        for phrase in phrases
        if not any(phrase in message for message in by_class.get(name, []))
    ]
    assert stale == []


def test_sentences_without_a_class_are_printed_somewhere() -> None:
    source = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "requant").rglob("*.py"))
    for phrase in families()["Warnings and other messages"]:
        if not phrase.startswith(("--", "dtype")):
            assert phrase in source, phrase


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []
    assert page.name == "index.md" or f"]({page.name})" in (DOCS / "index.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    group = typer.main.get_command(app)
    options = {
        name: {option for parameter in command.params for option in (*parameter.opts, "--help")}
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }
    every = set().union(*options.values(), {"--version", "--install-completion", "--show-completion"})
    text = page.read_text(encoding="utf-8")
    for name, rest in re.findall(r"requant ([a-z]+)((?: [^\n`#]*)?)", text):
        if name in options:
            unknown = {word for word in re.findall(r"(?<!\S)--[a-z-]+", rest)} - options[name]
            assert not unknown, f"requant {name}: {unknown}"
    foreign = {"--upgrade", "--index-url", "--tensor-parallel-size", "--pipeline-parallel-size"}
    foreign |= {"--nproc-per-node"}  # of torchrun
    foreign |= {"--out", "--no-fused", "--rotations-apart", "--widths"}  # of eval/end_to_end.py
    assert {word for word in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)} - every - foreign == set()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_commands_in_blocks_are_complete(page: Path) -> None:
    """Typed as they stand they are parsed: nothing that a command must be given is missing."""
    group: Any = typer.main.get_command(app)
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in "\n".join(blocks).splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["requant"] and words[1] in group.commands:
            group.commands[words[1]].make_context(words[1], words[2:])  # raises a UsageError


def test_python_on_the_pages_parses() -> None:
    blocks = [
        (page.name, block)
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    ]
    assert blocks
    for _, block in blocks:
        ast.parse(block)


def test_nothing_is_coloured(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """So NO_COLOR has nothing to switch off, whatever the terminal says of itself."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("CLICOLOR_FORCE", "1")
    for arguments in (("--help",), ("recipes",), ("quantize", "--bits", "99"), ("quantize", "--nothing")):
        _, out, error = cli(*arguments)
        assert out + error and "\x1b" not in out + error


def test_completion_is_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the script that `--install-completion` writes asks for: the commands, at the first word."""
    monkeypatch.setenv("_REQUANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "requant qu")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setattr("sys.argv", ["requant"])
    with pytest.raises(SystemExit):
        app(prog_name="requant")
    assert capsys.readouterr().out.split() == ["quantize"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("quantize --mode ", {"best", "paper", "dense"}),
        ("quantize --method ", set(METHODS)),
        ("quantize --for ", set(READERS)),
        ("quantize --for l", {"llama.cpp"}),
        ("quantize --sensitivity ", set(get_args(Score))),
        ("quantize --model llama-3.3", {"llama-3.3-70b-instruct"}),
        ("quantize --model de", {"demo"}),
        ("quantize --recipe demo-lut", {"demo-lut-3bit"}),
        ("sparsify --method ", set(PRUNING_METHODS)),
        ("export --to ", {*TARGETS, *READERS}),
    ],
)
def test_completion_offers_values(monkeypatch, capsys, line: str, offered: set[str]) -> None:
    words = f"requant {line}"
    monkeypatch.setenv("_REQUANT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
    monkeypatch.setattr("sys.argv", ["requant"])
    with pytest.raises(SystemExit):
        app(prog_name="requant")
    assert set(capsys.readouterr().out.split()) == offered
