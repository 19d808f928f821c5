"""A byte tokenizer, a text, folders of tiny models and the command line, shared by all tests; folders are made once.

torch and transformers are imported by the functions that use them: the process that hands out the tests runs none, and would
spend five seconds on them while the others wait for it.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# One thread, whatever the shell says: there is a process of tests a core, and threads of each would wait for the other's, in
# tiny operations for many times what these take.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest

from .architectures import build_model
from .script_forks import ScriptForks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from requant.text.sources import Text


def typechecker(checked: Any) -> Any:
    """Of `--jaxtyping-packages`: beartype, but an int will do for a float, as in all of Python's typing (PEP 484)."""
    from beartype import BeartypeConf, beartype

    return beartype(checked, conf=BeartypeConf(is_pep484_tower=True))


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end: the garbage collector need not look through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # nor so often at what tests leave


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and an end of text. Lines are split, but not words: a text is tokenised in half the time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {
        character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<end>")


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """`shared("models/bench-32m")`: a file or folder beside the repository; skips the test where there is none.

    REQUANT_SHARED names another folder than `../shared`; empty, it hides the folder.
    """
    folder = os.environ.get("REQUANT_SHARED", str(Path(__file__).parents[2] / "shared"))

    def path_of(name: str) -> Path:
        path = Path(folder, name)
        if not folder or not path.exists():
            pytest.skip(f"needs ../shared/{name}, which is not part of the repository")
        return path

    return path_of


@pytest.fixture
def unchecked_types(pytestconfig: pytest.Config) -> None:
    """Skips a test that passes objects of wrong types, where these are checked at every call, before the product does."""
    if pytestconfig.getoption("--jaxtyping-packages", None):
        pytest.skip("the check of types refuses what the test passes")


@pytest.fixture(autouse=True)
def one_seed() -> None:
    import torch

    random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which notes where it was called from, for a GPU that may come: 2 ms a test
        torch.default_generator.manual_seed(0)


@pytest.fixture
def counting_compiler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Blocks are compiled as on a GPU, but on a CPU and by a compiler that only counts; its `frame_count`."""
    import torch

    from requant.finetune import compile_blocks  # not before jaxtyping's hook, which comes after this file

    counting, compile_with = pytest.importorskip("torch._dynamo.testing").CompileCounter(), torch.compile
    torch._dynamo.reset()  # a function may be compiled eight times, over all tests of a process
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_with(f, backend=counting, dynamic=False))
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(compile_blocks, "_in_training", lambda: True)
    monkeypatch.setattr(compile_blocks, "_compiler_works", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return counting


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_text() -> Text:
    """40,000 characters of English."""
    from requant.text.sources import Text, read_text

    return Text.from_documents("tiny", [read_text("demo").text[:40_000]])


@pytest.fixture(scope="session")
def tiny_text_file(tiny_text: Text, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "tiny.txt"
    file.write_text(tiny_text.text)
    return file


@pytest.fixture(scope="session")
def tiny_folder(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`tiny_folder(name)`: the folder of a model, as the hub has it; not to be changed."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            model, folder = build_model(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            made[name] = folder
        return made[name]

    return folder_of


@pytest.fixture(scope="session")
def script_forks() -> Iterator[Callable[..., ScriptForks]]:
    """`script_forks("torch", NAME="value")`: the process that forks for scripts, after these imports, made once."""
    started: dict[object, ScriptForks] = {}

    def of(*modules: str, **environment: str) -> ScriptForks:
        key = modules, tuple(environment.items())
        if key not in started:
            started[key] = ScriptForks(modules, environment)
        return started[key]

    yield of
    for forks in started.values():
        forks.close()


@pytest.fixture
def interpreted(
    request: pytest.FixtureRequest, script_forks: Callable[..., ScriptForks]
) -> Callable[..., None]:
    """`interpreted("script.py", "argument")` runs a script beside the test with Triton's interpreter for its compiler.

    In a process of its own, since Triton reads the choice when it is imported. Asserts that the script ends well.
    """
    pytest.importorskip("triton")

    def run(name: str, *arguments: str) -> None:
        script = request.path.with_name(name)
        # Gluon's kernels are not to be imported before `gluon_as_triton.py`
        module = "requant_kernels" if script.parent.name == "kernels" else "requant.inference.load"
        (done,) = script_forks(module, TRITON_INTERPRET="1").run(script, arguments)
        assert done.code == 0, done.error[-3000:]

    return run


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`cli("quantize", "--bits", 3)`: exit code, stdout and stderr of the command line, in this process."""
    from requant.cli import main

    # the command sets it for its process, which here goes on
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["requant", *map(str, arguments)])
        capsys.readouterr()
        try:
            main()
            code = 0
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else int(bool(done.code))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run
