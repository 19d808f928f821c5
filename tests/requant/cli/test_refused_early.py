"""Values that a command refuses before its imports, which take seconds, in the words that Python users are told."""

import re
import subprocess
import sys

import pytest

import requant
from requant.errors import InputError
from requant.evaluation.tasks import evaluate_tasks
from requant.models.devices import pick_device
from requant.models.loading import load_model

# command line -> the sentence, or how it begins
WRONG = {
    "export x --output out --to gguff": "--to gguff is unknown (did you mean 'gguf'?)",
    "export x --output out --to dense --dtype int4": "--dtype int4 is unknown; give auto, float32",
    "generate x --prompt a --dtype int4": "--dtype int4 is unknown; give auto, float32",
    "bench x --batch 0": "--batch 0 is not a list of whole numbers",
    "eval x --device gpu": "--device gpu is unknown; give auto, cpu, cuda or cuda:NUMBER.",
    "quantize --bits 3 --device cuda:x": "--device cuda:x is unknown; give auto, cpu, cuda or cuda:NUMBER.",
    "serve x --device cuda:-1": "--device cuda:-1 is unknown; give auto, cpu, cuda or cuda:NUMBER.",
    "quantize --bits 3 --gpu-memory abc": "--gpu-memory abc is not a size; give a number of bytes",
    "quantize --bits 3 --gpu-memory=-1GiB": "--gpu-memory -1GiB is not a size; give a number of bytes",
    "quantize --bits 3 --gpu-memory 0": "--gpu-memory 0 is nothing; give the bytes that may be taken",
    "quantize --bits 3 --gpu-memory ''": "--gpu-memory  is not a size; give a number of bytes",
    "sweep --bits 2,3 --gpu-memory 24XB": "--gpu-memory 24XB is not a size; give a number of bytes",
    "sparsify --gpu-memory 24XB": "--gpu-memory 24XB is not a size; give a number of bytes",
    "sweep --bits 2,x": "--bits x is not a number; give 1 to 8, like 3 or 2.25.",
    "sweep --bits '2 3'": "--bits 2 3 is not a number; give 1 to 8, like 3 or 2.25.",
    "sweep --bits 2,9": "--bits 9 is out of range; give 1 to 8, like 3 or 2.25.",
    "sweep --bits 3": "a sweep takes two or more different --bits, such as 2,2.5,3,4.",
    "sweep --bits 3,3.0": "a sweep takes two or more different --bits, such as 2,2.5,3,4.",
    "sweep --bits ''": "a sweep takes two or more different --bits, such as 2,2.5,3,4.",
    "eval x --tasks ''": "--tasks names no task; give lm-eval's names, separated by commas.",
    "eval x --tasks ' ,'": "--tasks names no task; give lm-eval's names, separated by commas.",
    "sweep --bits 2,3,": "--bits 2,3, has a comma with nothing before or after it; leave that comma out.",
    "sweep --bits '2, ,3'": "--bits 2, ,3 has a comma with nothing before or after it; leave that comma out.",
    "eval x --tasks boolq,,piqa": "--tasks boolq,,piqa has a comma with nothing before or after it; leave that comma out.",
    "eval x --tasks ,boolq": "--tasks ,boolq has a comma with nothing before or after it; leave that comma out.",
    "eval x --tasks boolq": "tasks need the package lm-eval; install it with `pip install ",
    "quantize --bits 9": "--bits 9 is out of range; give 1 to 8, like 3 or 2.25.",
    "quantize --bits x": "--bits x is not a number; give 1 to 8, like 3 or 2.25.",
    "quantize --code-bits 9": "--code-bits 9 is out of range; give 1 to 8, like 3 or 2.25.",
    "sensitivity --bits 9": "--bits 9 is out of range; give 1 to 8, like 3 or 2.25.",
    "quantize --size 9XB": "--size 9XB is not a size; give a number of bytes",
    "quantize --size 0": "--size 0 is nothing; give the bytes that may be taken",
    "eval x --tasks 'boolq, piqa arc_easy'": "--tasks piqa arc_easy has blanks in it; separate lm-eval's names",
}


@pytest.fixture(scope="module")
def refused() -> dict[str, tuple[str, bool]]:
    """Command line -> what it is refused with, and whether torch had been imported."""
    script = f"""
import shlex, sys
sys.modules["lm_eval"] = None  # as if it were not installed
from requant import cli, errors
for line in {[*WRONG]}:
    try:
        cli.app(shlex.split(line))
    except errors.InputError as error:
        print(error.exit_code, "torch" in sys.modules, error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said = [line.split(" ", 2) for line in ended.stdout.splitlines()]
    assert [code for code, _, _ in said] == ["2"] * len(WRONG)
    return {
        line: (sentence, imported == "True")
        for line, (_, imported, sentence) in zip(WRONG, said, strict=True)
    }


@pytest.mark.parametrize("line", WRONG)
def test_wrong_values_are_refused_before_imports_that_take_seconds(refused, line: str) -> None:
    sentence, imported_torch = refused[line]
    assert sentence.startswith(WRONG[line]) and not imported_torch


def test_python_users_are_told_the_same(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    calls = {
        "export x --output out --to gguff": lambda: requant.export("x", "gguff", "out"),
        "generate x --prompt a --dtype int4": lambda: load_model("demo", device="cpu", dtype="int4"),
        "eval x --device gpu": lambda: pick_device("gpu"),
        "eval x --tasks boolq": lambda: evaluate_tasks(["x"], ["boolq"]),
        "quantize --bits 9": lambda: requant.quantize("demo", bits=9),
        "quantize --code-bits 9": lambda: requant.quantize("demo", code_bits=9),
        "quantize --size 9XB": lambda: requant.quantize("demo", size="9XB"),
        "sweep --bits 2,x": lambda: requant.sweep("demo", [2, "x"]),
        "sweep --bits 3,3.0": lambda: requant.sweep("demo", [3, 3.0]),
    }
    for line, call in calls.items():
        with pytest.raises(InputError, match=f"^{re.escape(refused[line][0])}$"):
            call()
