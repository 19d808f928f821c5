"""Chat templates, which are programs of strangers: the text of honest ones, and limits for the others."""

import copy
import time
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest

from requant.errors import TextError
from requant.text.chat import ChatTemplate

HONEST = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
MESSAGES = [{"role": "user", "content": "a\u2028<b>\U0001f600"}]


@pytest.fixture(scope="module")
def renderer(tokenizer) -> Any:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = HONEST
    renderer = ChatTemplate(chatty, seconds=1.0, max_characters=10_000)
    yield renderer
    renderer.close()


def test_the_text_is_that_of_transformers(renderer: ChatTemplate, tokenizer) -> None:
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=HONEST, tokenize=False, add_generation_prompt=True
    )
    assert renderer.render(MESSAGES) == expected == "<end>[user]a\u2028<b>\U0001f600[assistant]"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than 1 s"),
        pytest.param("{{ 10**(10**9) }}", "longer than 1 s|too much memory", marks=pytest.mark.slow),
        ("{{ 'x' * 10**10 }}", "takes too much memory"),
        ("{{ ('x' * 10**6)[0] }}", None),
        ("{{ 'x' * 10**6 }}", "more than 10,000 characters"),
        ("{{ raise_exception('no\nsystem\x1b role') }}", r"refuses these messages \(no"),
        ("{{ messages.nothing.at_all }}", "refuses these messages"),
        ("{% for", "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
    ],
)
def test_bounds(renderer: ChatTemplate, monkeypatch, template: str, sentence: str | None) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(renderer, "template", template)
        before = time.monotonic()
        if sentence is None:
            assert renderer.render(MESSAGES) == "x"
        else:
            with pytest.raises(TextError, match=sentence) as caught:
                renderer.render(MESSAGES)
            assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
        assert time.monotonic() - before < 20
    assert renderer.render(MESSAGES).endswith("[assistant]")  # the next one is served


@pytest.mark.parametrize("started", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_call_that_was_interrupted_leaves_no_answer_to_the_next(
    renderer: ChatTemplate, monkeypatch, started: bool
) -> None:
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    if started:
        renderer.render(MESSAGES)
    else:
        renderer.close()
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            renderer.render([{"role": "user", "content": "secret"}])
    assert renderer.render(MESSAGES) == f"<end>[user]{MESSAGES[0]['content']}[assistant]"


def test_its_process_ends_with_it(tokenizer) -> None:
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = HONEST
    renderer = ChatTemplate(chatty)
    before = set(psutil.Process().children())
    renderer.render(MESSAGES)
    (child,) = set(psutil.Process().children()) - before
    renderer.close()
    assert not child.is_running()


def test_a_model_without_a_template(tokenizer) -> None:
    with pytest.raises(TextError, match="no chat template"):
        ChatTemplate(tokenizer)
