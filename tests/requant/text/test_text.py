"""Sources give exactly their text, windows are what the peers' protocol takes, and errors say what to do."""

import hashlib
import json
import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from requant.errors import TextError
from requant.text import windows
from requant.text.sources import Text, read_text
from requant.text.windows import overlap, sample_self, token_windows

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "requant" / "data" / "demo"
PROSE = (
    "The river ran past the old town and into the sea , \n and nobody remembered its name .\r\n Café !\n" * 40
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO)


def text_of(content: str, name: str = "test") -> Text:
    return Text.from_documents(name, [content])


def write(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


@pytest.mark.parametrize("suffix", [".txt", ".raw", ".TXT"])
def test_plain_file_is_read_byte_for_byte(tmp_path, suffix):
    path = write(tmp_path / f"prose{suffix}", PROSE)
    text = read_text(path)
    assert text.text == PROSE
    assert text.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert text.name == path.name  # no folder: the name travels with the checkpoint


def test_jsonl_parquet_and_several_files_join_documents_by_a_blank_line(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    documents = ["one\ntwo", "three", "vier\u2028fünf"]
    lines = [json.dumps({"id": i, "body": body}, ensure_ascii=False) for i, body in enumerate(documents)]
    jsonl = write(tmp_path / "a.jsonl", "\n".join(lines) + "\n\n")
    parquet.write_table(arrow.table({"body": documents}), tmp_path / "a.parquet")
    plain = write(tmp_path / "b.txt", "last")
    assert read_text(jsonl, field="body").text == "\n\n".join(documents)
    assert read_text(tmp_path / "a.parquet", field="body").sha256 == read_text(jsonl, field="body").sha256
    both = read_text([jsonl, plain], field="body")
    assert both.text == "\n\n".join([*documents, "last"])
    assert both.name == "a.jsonl + b.txt"


def test_the_demo_halves_are_long_and_apart():
    calibration, evaluation = read_text("demo"), read_text("demo-eval")
    assert len(calibration.text) + len(evaluation.text) >= 400_000
    assert min(len(calibration.text), len(evaluation.text)) >= 180_000
    assert overlap(calibration, evaluation) < 0.01
    assert calibration.name == "demo (written by a model)"  # said wherever a result names its text
    assert "\ufffd" not in calibration.text + evaluation.text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n\t", "holds no text"),
        ("zeros.txt", bytes(4096), "NUL byte at byte 0, .*: give a text in UTF-8"),
        ("utf16.txt", "a few words".encode("utf-16-le"), "NUL byte at byte 1"),
        ("latin.txt", b"caf\xe9", "not UTF-8 at byte 3"),
        ("book.pdf", b"%PDF", r"ends in \.pdf: use one of \.txt"),
        ("field.jsonl", b'{"body": "x", "id": 1}\n', "choose one of 'body', 'id'"),
        ("number.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line 2: field 'text' holds a value of type int"),
        ("list.jsonl", b'["x"]\n', "line 1 holds a list"),
        ("broken.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("deep.jsonl", b"[" * 200_000, "line 1 is not JSON"),
        ("surrogate.jsonl", b'{"text": "\\ud800"}', "half a surrogate pair"),
        ("fake.parquet", b"not parquet at all", "not a readable parquet"),
    ],
)
def test_unusable_files_say_what_to_do(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=message):
        read_text(tmp_path / name)


def test_wrong_parquet_column_lists_the_columns(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(TextError, match="choose one of 'body', 'n'"):
        read_text(tmp_path / "a.parquet")
    with pytest.raises(TextError, match="field 'n' holds a value of type int"):
        read_text(tmp_path / "a.parquet", field="n")


def test_missing_sources_name_the_nearest(tmp_path):
    write(tmp_path / "wiki.test.raw", PROSE)
    with pytest.raises(TextError, match=r"did you mean wiki\.test\.raw"):
        read_text(tmp_path / "wiki.tset.raw")
    with pytest.raises(TextError, match="is a folder"):
        read_text(tmp_path)
    with pytest.raises(TextError, match="no text was given"):
        read_text([])
    with pytest.raises(TextError, match="the model writes"):
        read_text("self")


def test_a_path_may_begin_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "corpus.txt").write_text("some words")
    assert read_text("~/corpus.txt").name == "corpus.txt"


def test_a_link_that_leads_nowhere_is_not_its_own_nearest_name(tmp_path):
    (tmp_path / "corpus.txt").symlink_to("gone.txt")
    with pytest.raises(TextError, match=r"there is no file .*corpus\.txt: the link leads to gone\.txt"):
        read_text(tmp_path / "corpus.txt")


@pytest.mark.parametrize("given", ["The cat sat.\nThe dog ran.", "the cat sat on the mat " * 1000])
def test_text_in_place_of_its_name_is_refused_without_being_repeated(given):
    with pytest.raises(TextError, match="is neither a file nor the name of one: write it to a") as refusal:
        read_text([given])
    assert len(str(refusal.value)) < 200


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("given", [3, b"demo", {"a": 1}, ["demo", 3]], ids=repr)
def test_what_is_no_name_is_refused(given):
    with pytest.raises(TextError, match="a text must be a path or a name, or a list of them, not "):
        read_text(given)


def test_optional_libraries_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(TextError, match=r"pip install .*\[data\]"):
        read_text(tmp_path / "a.parquet")
    with pytest.raises(TextError, match=r"neither a file .* `pip install .*\[data\]"):
        read_text("wikitext")


@pytest.fixture
def fake_hub(monkeypatch):
    """`fake_hub(load_dataset, asked)`: a package `datasets`, and what the hub answers when it is asked for a data set."""

    def install(load_dataset, asked=lambda *_, **__: None):
        package = SimpleNamespace(load_dataset=load_dataset, config=SimpleNamespace(HF_HUB_OFFLINE=False))
        monkeypatch.setitem(sys.modules, "datasets", package)
        monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", asked)
        return package

    return install


def test_hub_data_set_is_streamed_and_cut(fake_hub, monkeypatch, caplog):
    asked = []

    def load_dataset(*names, **options):
        asked.append((names, options))
        return iter([{"text": "word " * 10}] * 1000)

    fake_hub(load_dataset)
    monkeypatch.setattr("requant.text.sources.MAX_HUB_CHARACTERS", 100)
    text = read_text("org/set:config:test")
    assert asked == [(("org/set", "config"), {"split": "test", "streaming": True})]
    assert text.text == "\n\n".join(["word " * 10] * 2)
    assert "the first 100 characters only" in caplog.text
    with pytest.raises(TextError, match="row 0 has no field 'body': choose one of 'text'"):
        read_text("org/set", field="body")


def test_hub_out_of_reach_is_one_sentence(fake_hub):
    def load_dataset(*names, **options):
        raise ConnectionError("no route\nto the hub")

    fake_hub(load_dataset)
    with pytest.raises(TextError, match=r"neither a file .* \(no route\): check the name and the network"):
        read_text("org/set")


@pytest.mark.parametrize("cached", [False, True])
def test_a_hub_that_does_not_answer_is_asked_once(fake_hub, cached):
    """`datasets` would ask it six times, for half a minute, before it looks into its cache."""

    def dataset_info(*_, timeout, **__):
        assert timeout <= 10
        raise OSError("no such host")

    def load_dataset(*names, **options):
        assert package.config.HF_HUB_OFFLINE
        if cached:
            return [{"text": "words"}]
        raise ConnectionError("offline mode is enabled")

    package = fake_hub(load_dataset, dataset_info)
    if cached:
        assert read_text("org/set").text == "words"
    else:
        with pytest.raises(
            TextError, match=r"did not give it \(no such host\): check the name and the network"
        ):
            read_text("org/set")
    assert not package.config.HF_HUB_OFFLINE


def test_a_hub_that_refuses_is_left_to_datasets(fake_hub):
    """A wrong name, a licence to accept: it says so better, and at once."""

    def dataset_info(*_, **__):
        raise HFValidationError("no name")

    def load_dataset(*names, **options):
        assert not package.config.HF_HUB_OFFLINE
        raise ValueError("it is gated")

    package = fake_hub(load_dataset, dataset_info)
    with pytest.raises(TextError, match=r"\(it is gated\)"):
        read_text("org/set")


@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_windows_lie_evenly_over_the_text_tokenised_once(tokenizer, num_samples):
    tokens = tokenizer(PROSE, add_special_tokens=False, verbose=False)["input_ids"]
    total = len(tokens) // 16
    windows = token_windows(text_of(PROSE), tokenizer, num_samples=num_samples, seq_len=16)
    expected = []
    for i in range(num_samples):
        start = 16 * int(i * total / num_samples)
        expected.append(tokens[start : start + 16])
    assert windows.tolist() == expected


def test_all_windows_are_the_text_without_its_tail(tokenizer, recwarn):
    tokens = tokenizer(PROSE, add_special_tokens=False, verbose=False)["input_ids"]
    windows = token_windows(text_of(PROSE), tokenizer, num_samples=None, seq_len=30)
    assert windows.flatten().tolist() == tokens[: len(tokens) // 30 * 30]


def test_a_seed_shifts_by_less_than_a_window(tokenizer):
    text = text_of(PROSE)
    first = token_windows(text, tokenizer, num_samples=4, seq_len=16)
    one, again, two = (token_windows(text, tokenizer, num_samples=4, seq_len=16, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, first) and not torch.equal(one, two)


def test_long_text_tokenises_without_a_length_warning(tokenizer, caplog):
    token_windows(text_of("a b c " * 3000), tokenizer, num_samples=None, seq_len=8)
    assert not caplog.records


@pytest.mark.parametrize("rust", [True, False])
def test_tokens_are_those_of_the_tokenizer(tokenizer, monkeypatch, rust):
    """Also of the texts of special tokens, and after a call that truncates; and of a tokenizer in Python."""
    if not rust:
        monkeypatch.setattr(windows, "PreTrainedTokenizerFast", SimpleNamespace)
    content = PROSE + tokenizer.all_special_tokens[0] + PROSE
    tokenizer(["a b c", "d"], truncation=True, max_length=2)
    expected = tokenizer(content, add_special_tokens=False)["input_ids"]
    tokenizer(["a b c", "d"], truncation=True, max_length=2)
    found = token_windows(text_of(content), tokenizer, num_samples=None, seq_len=len(expected))
    assert found.tolist() == [expected]


def tokenizer_of(kind: str, content: str) -> PreTrainedTokenizerFast:
    """Of bytes; of words, the first of which has a mark as all have; WordPiece; of characters, some across lines."""
    merges = [("\n", letter) for letter in "TaC"]
    tokens = sorted(set(content)) + ["".join(pair) for pair in merges]
    across = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    model, before, trainer = {
        "byte-level": (models.BPE(), pre_tokenizers.ByteLevel(add_prefix_space=False), trainers.BpeTrainer),
        "marked": (models.BPE(), pre_tokenizers.Metaspace(prepend_scheme="first"), trainers.BpeTrainer),
        "wordpiece": (
            models.WordPiece(unk_token="?"),
            pre_tokenizers.BertPreTokenizer(),
            trainers.WordPieceTrainer,
        ),
        "across lines": (across, None, None),
    }[kind]
    backend = Tokenizer(model)
    if trainer is not None:
        backend.pre_tokenizer = before
        backend.train_from_iterator([content], trainer(vocab_size=400, special_tokens=["?"]))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize(
    ("kind", "parts"), [("byte-level", True), ("wordpiece", True), ("marked", False), ("across lines", False)]
)
def test_a_long_text_is_tokenized_in_parts_that_change_nothing(monkeypatch, kind: str, parts: bool) -> None:
    """Where a tokenizer marks the beginning of a text, or joins the end of a line to the next, in one part."""
    content = PROSE.replace("\n ", "\n")
    tokenizer = tokenizer_of(kind, content)
    whole = tokenizer.backend_tokenizer.encode(content, add_special_tokens=False).ids
    monkeypatch.setattr(windows, "PART", 300)
    monkeypatch.setattr(windows, "AROUND", 60)
    seen: list[list[str]] = []
    divided = windows._parts
    monkeypatch.setattr(windows, "_parts", lambda *args: seen.append(divided(*args)) or seen[-1])
    found = token_windows(text_of(content), tokenizer, num_samples=None, seq_len=len(whole))
    assert found.tolist() == [whole]
    assert "".join(seen[0]) == content and (len(seen[0]) > 5) == parts
    assert parts or len(seen[0]) == 1


def test_fewer_windows_than_asked_warns_and_uses_all(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        windows = token_windows(text_of(PROSE), tokenizer, num_samples=10_000, seq_len=64)
    assert 0 < len(windows) < 10_000
    assert "lower --seq-len" in caplog.text


def test_no_whole_window_says_found_and_needed(tokenizer):
    with pytest.raises(TextError, match=r"holds \d+ tokens and one window needs 512: lower --seq-len"):
        token_windows(text_of("too short"), tokenizer, num_samples=4, seq_len=512)
    with pytest.raises(TextError, match="no token to predict"):
        token_windows(text_of(PROSE), tokenizer, num_samples=4, seq_len=1)


@pytest.mark.parametrize("words", [2, 12, 13, 14, 400])
def test_overlap_is_that_of_sets_of_runs(words: int) -> None:
    """As defined, with the runs themselves in place of their hashes; few different words, so that runs come again."""
    draw = random.Random(words)
    parts = [[draw.choice("abc") for _ in range(count)] for count in (words, 200, 13, 12)]

    def runs_of(text: list[str]) -> list[tuple[str, ...]]:
        return [tuple(text[start : start + 13]) for start in range(max(1, len(text) - 12))]

    for calibration in (parts[0], parts[0][1:], parts[1], parts[0] + parts[1], parts[2][::-1] + parts[0]):
        for evaluation in (parts[0] + parts[3], *parts):
            there = set(runs_of(calibration))
            expected = sum(run in there for run in runs_of(evaluation)) / len(runs_of(evaluation))
            found = overlap(
                *(Text.from_documents("t", [" ".join(each)]) for each in (calibration, evaluation))
            )
            assert found == expected


def test_overlap_is_the_share_of_shared_runs():
    ours = " ".join(f"a{i}" for i in range(500))
    theirs = " ".join(f"b{i}" for i in range(500))
    assert overlap(text_of(ours), text_of(theirs)) == 0.0
    assert overlap(text_of(ours), text_of(ours)) == 1.0
    assert overlap(text_of(ours), text_of(f"{ours} {theirs}")) == pytest.approx(0.5, abs=0.02)


def test_the_models_own_text_repeats_with_its_seed_and_leaves_the_global_state(tokenizer, monkeypatch):
    monkeypatch.setattr("requant.text.windows.SELF_BATCH", 2)
    monkeypatch.setattr("requant.text.windows.SELF_TOKENS", 24)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    state = torch.get_rng_state()
    one, again, two = (sample_self(model, tokenizer, num_tokens=50, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    assert one.sha256 == again.sha256 != two.sha256
    assert len(tokenizer(one.text)["input_ids"]) >= 50
    assert one.name == "self"


def test_a_device_is_no_text():
    with pytest.raises(TextError, match="there is no file /dev/zero, but a pipe or a device"):
        read_text("/dev/zero")
