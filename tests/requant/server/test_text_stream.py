import random

import pytest

from requant.server.text_stream import TextStream

TEXTS = ("plain words", "Grüße, 東京 🎉🎉 e\u0301", "a\u200d🏳️\u200d🌈b", "")


def pieces(tokenizer, text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    stream = TextStream(tokenizer, stop)
    out = [stream.push(token) for token in tokenizer(text)["input_ids"]]
    return [*out, stream.finish()], stream


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text(tokenizer, text: str) -> None:
    out, stream = pieces(tokenizer, text)
    assert "".join(out) == text and not stream.stopped
    assert not any("\ufffd" in piece for piece in out), "a character in halves"


def test_bytes_that_never_become_a_character_come_out_at_last(tokenizer) -> None:
    stream = TextStream(tokenizer)
    broken = tokenizer("é")["input_ids"][:1]
    assert stream.push(broken[0]) == "" and stream.finish() == "\ufffd"
    stream = TextStream(tokenizer)
    out = [stream.push(broken[0]) for _ in range(20)]
    assert "".join(out), "held back for ever"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two"), "one "),
        ("ababac", ("abac",), "ab"),
        ("no end", ("end!",), "no end"),
        ("x" * 9 + "yz", ("xyz",), "x" * 8),
        ("日本語", ("本",), "日"),
        ("start", ("start",), ""),
    ],
)
def test_nothing_from_a_stop_string_on(tokenizer, text: str, stop: tuple[str, ...], expected: str) -> None:
    out, stream = pieces(tokenizer, text, stop)
    assert "".join(out) == expected
    assert stream.stopped == (expected != text)
    assert stream.finish() == ""


def test_no_text_is_held_longer_than_it_may_be_a_stop(tokenizer) -> None:
    stream = TextStream(tokenizer, ("END",))
    out = [stream.push(token) for token in tokenizer("aEbENcEND")["input_ids"]]
    assert out == ["a", "", "Eb", "", "", "ENc", "", "", ""] and stream.stopped


def test_random_texts_against_a_plain_search(tokenizer) -> None:
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choice("abcé") for _ in range(30))
        stops = tuple(
            "".join(generator.choice("abcé") for _ in range(generator.randint(1, 4))) for _ in range(2)
        )
        out, _ = pieces(tokenizer, text, stops)
        ends = [text.find(stop) for stop in stops if stop in text]
        found = "".join(out)
        # The first stop string to be complete ends the text; one that begins earlier may need a later character.
        complete = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
        if complete is None:
            assert found == text
        else:
            assert text.startswith(found) and len(found) in ends and len(found) <= complete
