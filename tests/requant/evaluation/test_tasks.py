"""Our task files ask what lm-eval's own tasks ask, and the accuracy is the one counted by hand."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from requant.errors import InputError, TextError
from requant.evaluation.tasks import LOCAL, TaskScore, evaluate_tasks, local_task, score_rows
from requant.models.loading import load_model, load_tokenizer, resolve_source

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # lm-eval's
# A document as the hub has it and as our files have it.
DOCUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lambada_openai": (
        {"text": "He saw a sign, and did not care about signs"},
        {"text": "He saw a sign, and did not care about signs", "context": "", "target": ""},
    ),
    "piqa": (
        {"goal": "Open a jar", "sol1": "Twist the lid", "sol2": "Eat the lid", "label": 0},
        {"query": "Question: Open a jar\nAnswer:", "choices": ["Twist the lid", "Eat the lid"], "gold": 0},
    ),
    "arc_easy": (
        {
            "question": "What is hot?",
            "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        },
        {"query": "Question: What is hot?\nAnswer:", "choices": ["ice", "fire", "snow"], "gold": 1},
    ),
    "arc_challenge": (
        {"question": "Why?", "choices": {"text": ["so", "not"], "label": ["1", "2"]}, "answerKey": "2"},
        {"query": "Question: Why?\nAnswer:", "choices": ["so", "not"], "gold": 1},
    ),
    "hellaswag": (
        {
            "activity_label": "Roof removal",
            "ctx_a": "A man is sitting on a roof.",
            "ctx_b": "he",
            "endings": ["jumps [substeps] up.", "sings."],
            "label": "1",
        },
        {
            "query": "Roof removal: A man is sitting on a roof. He",
            "choices": ["jumps up.", "sings."],
            "gold": 1,
        },
    ),
    "winogrande": (
        {"sentence": "Ann met Bea because _ was late.", "option1": "Ann", "option2": "Bea", "answer": "2"},
        {
            "context_options": ["Ann met Bea because Ann", "Ann met Bea because Bea"],
            "continuation": "was late.",
            "gold": 1,
        },
    ),
}


def write(folder: Path, task: str, documents: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n")
    return folder


def build(definition: dict[str, Any], folder: Path) -> Any:
    """The lm-eval task of a definition."""
    import yaml
    from lm_eval.tasks import TaskManager

    folder.mkdir()
    (folder / "task.yaml").write_text(yaml.safe_dump(definition))
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return manager.load([definition["task"]])["tasks"][definition["task"]]


def asked(task: Any) -> list[Any]:
    """Every request for the documents, as sent to the model."""
    task.build_all_requests()
    return [(instance.request_type, instance.args, instance.idx) for instance in task.instances]


@pytest.mark.parametrize("name", LOCAL)
def test_the_requests_are_lm_evals_own(name: str, tmp_path: Path) -> None:
    """lm-eval's definition on a raw document, ours on the prepared one."""
    raw, prepared = DOCUMENTS[name]
    ours = local_task(name, write(tmp_path / "data", name, [prepared]), cache=str(tmp_path))
    unchanged = {key: value for key, value in ours.items() if not key.startswith(("doc_to", "process"))}
    raw_file = write(tmp_path / "raw", name, [raw]) / f"{name}.jsonl"
    unchanged["dataset_kwargs"] = {"data_files": {"test": str(raw_file)}, "cache_dir": str(tmp_path)}
    theirs = build({**unchanged, "task": "theirs"}, tmp_path / "a")
    mine = build(ours, tmp_path / "b")
    assert asked(mine) == asked(theirs) and len(asked(mine)) == len(prepared.get("choices", [1])) + (
        name == "winogrande"
    )
    assert mine.aggregation().keys() == theirs.aggregation().keys()
    document, other = mine.test_docs()[0], theirs.test_docs()[0]
    replies = [(-3.0 + index, index == 0) for index in range(len(asked(mine)))]
    if name == "lambada_openai":
        replies = replies[0]
    assert mine.process_results(document, [replies] if name == "lambada_openai" else replies) == (
        theirs.process_results(other, [replies] if name == "lambada_openai" else replies)
    )


@pytest.mark.parametrize("name", LOCAL)
def test_the_shared_files_are_wired(name: str, shared: Callable[[str], Path], tmp_path: Path) -> None:
    lines = shared(f"data/tasks/{name}.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    documents = list(map(json.loads, lines))
    task = build(
        local_task(name, write(tmp_path / "data", name, documents), cache=str(tmp_path)), tmp_path / "a"
    )
    requests = [(args, index) for _, args, index in asked(task)]
    document = documents[0]
    if name == "lambada_openai":
        assert requests[0][0] == (document["context"], document["target"])
    elif name == "winogrande":
        assert [args for args, _ in requests[:2]] == [
            (context, " " + document["continuation"]) for context in document["context_options"]
        ]
        assert task.doc_to_text(document) == document["gold"]
    else:
        assert [args for args, _ in requests[: len(document["choices"])]] == [
            (document["query"], " " + choice) for choice in document["choices"]
        ]
        assert task.doc_to_target(document) == document["gold"]


def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """log p(continuation | context), straight from the logits."""
    head = tokenizer(context)["input_ids"]
    whole = tokenizer(context + continuation)["input_ids"]
    with torch.inference_mode():
        scores = model(torch.tensor([whole[:-1]])).logits[0].float().log_softmax(-1)
    return sum(scores[place - 1, whole[place]].item() for place in range(len(head), len(whole)))


def test_accuracies_by_hand(shared: Callable[[str], Path], tmp_path: Path) -> None:
    data = shared("data/tasks")
    documents = [json.loads(line) for line in (data / "arc_easy.jsonl").read_text().splitlines()[:6]]
    endings = [json.loads(line) for line in (data / "winogrande.jsonl").read_text().splitlines()[:4]]
    write(tmp_path / "data", "arc_easy", documents)
    write(tmp_path / "data", "winogrande", endings)
    found = evaluate_tasks(["demo"], ["arc_easy", "winogrande"], data=tmp_path / "data", device="cpu")
    scores = {(score.task, score.metric): score for score in found}

    model = load_model("demo", device="cpu", dtype="auto")
    tokenizer = load_tokenizer(resolve_source("demo"))
    hits = []
    for document in documents:
        values = [log_likelihood(model, tokenizer, document["query"], " " + c) for c in document["choices"]]
        hits.append(float(max(range(len(values)), key=values.__getitem__) == document["gold"]))
    accuracy = sum(hits) / len(hits)
    assert scores["arc_easy", "acc"].value == pytest.approx(accuracy)
    error = (sum((hit - accuracy) ** 2 for hit in hits) / (len(hits) - 1) / len(hits)) ** 0.5
    assert (
        scores["arc_easy", "acc"].stderr == pytest.approx(error) and scores["arc_easy", "acc"].documents == 6
    )
    hits = []
    for document in endings:
        values = [
            log_likelihood(model, tokenizer, context, " " + document["continuation"])
            for context in document["context_options"]
        ]
        hits.append(float((values[1] > values[0]) == (document["gold"] == 1)))
    assert scores["winogrande", "acc"].value == pytest.approx(sum(hits) / len(hits))


def test_the_command(cli, shared: Callable[[str], Path]) -> None:
    before, state = dict(os.environ), torch.random.get_rng_state()
    arguments = (
        "eval",
        "demo",
        "demo",
        "--tasks",
        "lambada_openai, piqa",
        "--task-data",
        shared("data/tasks"),
        "--limit",
        3,
        "-q",
    )
    code, out, error = cli(*arguments)
    assert code == 0, error
    lines = out.splitlines()
    assert lines[0].split() == ["task", "metric", "demo", "documents"] and "bootstrapping" not in out
    assert [line.split()[:2] for line in lines[2:]] == [
        ["lambada_openai", "perplexity"],
        ["lambada_openai", "acc"],
        ["piqa", "acc"],
        ["piqa", "acc_norm"],
        ["mean", "acc"],
    ]
    assert " ± " in lines[4]
    code, out, _ = cli(*arguments, "--json")
    assert code == 0 and {entry["documents"] for entry in json.loads(out)} == {3}
    assert dict(os.environ) == before and torch.equal(torch.random.get_rng_state(), state)


def test_the_table_and_its_mean() -> None:
    def score(model: str, task: str, metric: str, value: float, stderr: float | None) -> TaskScore:
        return TaskScore(model=model, task=task, metric=metric, value=value, stderr=stderr, documents=9)

    rows = score_rows(
        [
            score("a", "piqa", "acc", 0.5, 0.01),
            score("a", "arc", "acc", 0.25, None),
            score("a", "arc", "perplexity", 123.456, 2.5),
            score("b", "piqa", "acc", 0.7, 0.02),
            score("b", "arc", "acc", 0.3, None),
        ]
    )
    assert rows[0] == {
        "task": "piqa",
        "metric": "acc",
        "a": "0.5000 ± 0.0100",
        "b": "0.7000 ± 0.0200",
        "documents": 9,
    }
    assert rows[2]["a"] == "123.46 ± 2.50" and rows[2]["b"] is None
    assert (
        score_rows([score("a", "x", "acc", 0.5, 0.03), score("a", "y", "acc", 0.1, 0.04)])[-1]["a"]
        == "0.3000 ± 0.0250"
    )
    assert rows[-1] == {"task": "mean", "metric": "acc", "a": "0.3750", "b": "0.5000", "documents": None}


def test_differences_are_paired_by_document(shared: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_model("demo", device="cpu", dtype="auto")
    tokenizer = load_tokenizer(resolve_source("demo"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    models = ["demo", str(tmp_path / "other"), "demo"]
    found = evaluate_tasks(
        models, ["piqa", "lambada_openai"], data=shared("data/tasks"), limit=40, device="cpu"
    )
    first, other, same = (found[i : i + len(found) // 3] for i in range(0, len(found), len(found) // 3))
    assert {(score.task, score.metric) for score in first} >= {("piqa", "acc"), ("lambada_openai", "acc")}
    for a, b, c in zip(first, other, same, strict=True):
        assert a.difference is None
        if b.metric == "perplexity":  # no mean over documents
            assert b.difference is None and c.difference is None
            continue
        assert b.difference == pytest.approx(b.value - a.value) and c.difference == c.difference_stderr == 0
    changed = next(score for score in other if (score.task, score.metric) == ("piqa", "acc_norm"))
    assert changed.difference is not None and changed.difference_stderr is not None
    assert 0 < changed.difference_stderr <= first[0].documents ** -0.5
    assert f"({changed.difference:+.4f} ± {changed.difference_stderr:.4f})" in str(score_rows(found))


def test_what_cannot_be_asked(cli, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(InputError, match=r"knows no task 'piqqa' \(did you mean 'piqa"):
        evaluate_tasks(["demo"], ["piqqa"])
    with pytest.raises(InputError, match="names no task"):
        evaluate_tasks(["demo"], [])
    with pytest.raises(TextError, match=r"piqa\.jsonl is missing"):
        evaluate_tasks(["demo"], ["piqa"], data=tmp_path)
    write(tmp_path, "piqa", [{"goal": "x"}])
    with pytest.raises(TextError, match="its first line has no column 'choices'"):
        evaluate_tasks(["demo"], ["piqa"], data=tmp_path)
    (tmp_path / "piqa.jsonl").write_text("not json")
    with pytest.raises(TextError, match="holds no JSON lines"):
        evaluate_tasks(["demo"], ["piqa"], data=tmp_path)
    code, _, error = cli("eval", "demo", "--tasks", "piqa", "--reference", "demo")
    assert code == 2 and "--reference has no effect with --tasks" in error
    code, _, error = cli("eval", "demo", "--limit", 3)
    assert code == 2 and "--limit has no effect with the evaluation of a text" in error
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"pip install .*\[tasks\]"):
        evaluate_tasks(["demo"], ["piqa"])
