"""OpenAI's client, in front of a small model; a checkpoint that a process can serve."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from requant.checkpoint.save import save_checkpoint
from requant.models.targets import find_linears

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def model(tiny_model) -> Any:
    from .harness import Slow

    return Slow(tiny_model("llama"))


@pytest.fixture(scope="module")
def chatty(tokenizer) -> Any:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = TEMPLATE
    return chatty


@pytest.fixture(scope="module")
def url(model, chatty) -> Iterator[str]:
    from requant.server.engine import Engine

    from .harness import LIMITS, running

    with running(Engine(model, chatty, limits=LIMITS)) as address:
        yield address


@pytest.fixture
def client(url: str, model) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    model.pause = 0.0
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def pristine_checkpoint(tiny_folder, random_weight, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer; not to be changed."""
    source = tiny_folder("llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    weights = {
        s.name: random_weight(*s.shape, kind="codebook", seed=i) for i, s in enumerate(find_linears(model))
    }
    return save_checkpoint(
        tmp_path_factory.mktemp("served") / "tiny-3bit",
        source=source,
        model=model,
        weights=weights,
        manifest={"requant_version": "0.1.0"},
    )
