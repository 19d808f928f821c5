"""Tiny models and random quantized matrices, shared by the tests of the package; what runs of tiny models go without."""

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedTokenizerFast

from requant.formats.quantized_weight import QuantizedWeight
from requant.text.sources import Text
from requant.text.windows import _token_ids, token_windows

from ..architectures import DENSE, EXPERTS, build_model
from ..script_forks import ScriptForks
from .greedy_search import greedy_states
from .random_checkpoints import build_checkpoint, build_trellis, build_weight


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `architecture` or `mixture` runs on each of them."""
    for argument, names in (("architecture", DENSE), ("mixture", tuple(EXPERTS))):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, names)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """`tiny_model(name, seed=0)`: a fresh model of an architecture."""
    return build_model


@pytest.fixture(scope="session")
def tiny_windows(tiny_text: Text, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Four windows of 32 tokens."""
    return token_windows(tiny_text, tokenizer, num_samples=4, seq_len=32)


@pytest.fixture(scope="session")
def trained_state(tiny_text: Text, tokenizer: PreTrainedTokenizerFast) -> dict[str, torch.Tensor]:
    windows = token_windows(tiny_text, tokenizer, num_samples=None, seq_len=32)
    model = build_model("llama").requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(120):
        tokens = windows[torch.arange(16) * 7 % 97 + step * 8 % (len(windows) - 97)]
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.fixture
def trained_model(trained_state: dict[str, torch.Tensor]) -> Any:
    """A tiny Llama that has learned some English: its loss has the curvature that random weights lack."""
    model = build_model("llama")
    model.load_state_dict(trained_state)
    return model


@pytest.fixture(scope="session")
def random_weight() -> Callable[..., QuantizedWeight]:
    return build_weight


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, nn.Module]]:
    return lambda *args, **kwargs: build_checkpoint(tmp_path, *args, **kwargs)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tied Llama in two shards; not to be changed."""
    return build_checkpoint(tmp_path_factory.mktemp("pristine"), "llama-tied", shard=60_000)[0]


@pytest.fixture
def checkpoint(pristine: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "copy"))


@pytest.fixture(scope="session")
def random_trellis() -> Callable[..., QuantizedWeight]:
    return build_trellis


@pytest.fixture(scope="module")
def any_trellis_codes() -> Iterator[None]:
    """Codes of a trellis in a hundredth of the time, and worse ones: for tests that hold of all codes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("requant.quantizers.block_ldlq.tail_biting_states", greedy_states)
        yield


@pytest.fixture
def greedy_trellis_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`any_trellis_codes` for one test of a module."""
    monkeypatch.setattr("requant.quantizers.block_ldlq.tail_biting_states", greedy_states)


@pytest.fixture(scope="module", autouse=True)
def coarse_levels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Levels of a row are cut from a quarter of the atoms, in half the time, but for the tests of quantizers, and of runs
    that other processes, where nothing is replaced, begin or end."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "quantizers" and request.path.name != "test_resume.py":
            for name, value in (("ATOMS", 32), ("ATOM_BITS", 4), ("REACH", 2)):
                patch.setattr(f"requant.quantizers.kmeans.{name}", value)
        yield


@pytest.fixture(autouse=True)
def no_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib takes a tenth of a second a page: the tests of pages have plots, others none."""
    if request.path.parent.name != "report":
        for name in ("sensitivity_plot", "alternatives_plot"):
            monkeypatch.setattr(f"requant.report.report.{name}", lambda *_, **__: b"<svg></svg>")


@pytest.fixture(autouse=True)
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of tiny models continue their prompts by a few tokens; `test_samples.py` writes whole ones."""
    monkeypatch.setattr("requant.evaluation.samples.NEW_TOKENS", 4)


@pytest.fixture
def full_reports() -> None:
    """A test that takes this has what `brief_reports` leaves out."""


@pytest.fixture(autouse=True)
def brief_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs predict no losses at other budgets, five integer programs for one, and measure no kinds of matrices alone, each
    by a pass.

    They do in tests of either, and in the folders whose tests read, print or draw such numbers.
    """
    full = request.path.parent.name in ("report", "cli", "evaluation")
    if not full and "full_reports" not in request.fixturenames:
        monkeypatch.setattr("requant.allocation.knapsack.OTHER_BUDGETS", (0,))  # below every model's least
        monkeypatch.setattr("requant.evaluation.diagnosis.KIND_WEIGHTS_ON_CPU", 0)


@pytest.fixture(scope="session")
def remembered_tokens() -> Callable[[str, Any], list[int]]:
    """Of a text by a tokenizer: nearly all runs are on one text, and on one of two models' tokenizers."""
    found: dict[tuple[str, str], list[int]] = {}

    def tokens_of(text: str, tokenizer: Any) -> list[int]:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            return _token_ids(text, tokenizer)
        key = (text, backend.to_str())
        if key not in found:
            found[key] = _token_ids(text, tokenizer)
        return found[key]

    return tokens_of


@pytest.fixture(autouse=True)
def texts_are_tokenized_once(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    remembered_tokens: Callable[[str, Any], list[int]],
) -> None:
    if request.path.parent.name != "text":
        monkeypatch.setattr("requant.text.windows._token_ids", remembered_tokens)


@pytest.fixture
def hosted(monkeypatch) -> Callable[[bool], None]:
    """`hosted(True)`: from now on the matrices of every model stay on the host."""

    def switch(on: bool) -> None:
        monkeypatch.setattr("requant.pipeline.preparation.prepare.stays_on_host", lambda *_, **__: on)

    return switch


@pytest.fixture
def in_processes(script_forks: Callable[..., ScriptForks]) -> Callable[..., list[str]]:
    """`in_processes(script, count, *arguments)`: what each rank of a run prints, as torchrun would start it."""

    def run(script: str, count: int, *arguments: str) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        ranks = [
            {**address, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            for rank in range(count)
        ]
        outputs = script_forks("requant.pipeline.quantize").run(script, arguments, ranks, seconds=120)
        assert not any(done.code for done in outputs), outputs
        return [done.output for done in outputs]

    return run
