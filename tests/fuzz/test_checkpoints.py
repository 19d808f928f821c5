"""Checkpoints with a damaged or hostile part: refused in a sentence, or loaded and equal; and soon, and in little memory.

A case is a number, from which its format, its part and what is done to it follow: `FUZZ_CASES=1017 pytest tests/fuzz`
runs one again. Weights that agree with their checksums and a config that transformers accepts are "as written": they
are what the author says, so only NaN and infinity in them would be a failure.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from requant.checkpoint.inspect import inspection
from requant.errors import RequantError
from requant.inference.load import load
from requant.models.loading import load_tokenizer, resolve_source
from requant.recipe.schema import Recipe
from requant.recipe.yaml_files import dump_recipe, load_recipe
from requant.text.chat import ChatTemplate

from ..requant.random_checkpoints import build_checkpoint, build_folded_checkpoint
from .mutations import PARTS

SECONDS, BYTES = 20.0, 1 << 30  # of a case, the bytes beyond what the process had before
FORMATS: dict[str, dict[str, Any]] = {
    "grid": {"kind": "asymmetric"},
    "symmetric grid": {"kind": "symmetric"},
    "grid with column scales": {"kind": "awq"},
    "codebook": {"kind": "codebook", "int8": True},
    "codebook of int8": {"kind": "codebook-int8", "int8": True, "one_scale": True},
    "trellis": {"kind": "trellis"},
    "trellis of int8": {"kind": "trellis-int8", "int8": True},
    "2:4": {"kind": "semi_structured"},
    "2:4 in the order of the hardware": {"kind": "semi_structured-hardware"},
    "2:4 of 16 bits": {"kind": "semi_structured-16"},
    "embedding on a grid": {"kind": "symmetric", "table": "asymmetric"},
    "embedding of trellis codes": {"kind": "trellis", "table": "trellis-rows"},
    "embedding in bands": {"kind": "trellis-int8", "table": "bands"},
    "embedding in bands of grids": {"kind": "codebook", "table": "bands-grid"},
    "folded rotations": {"folded": True},
}
AS_WRITTEN = {"header", "values", "config", "entry"}  # parts that an author may mean
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def pristine(tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            options = dict(FORMATS[name])
            build = build_folded_checkpoint if options.pop("folded", False) else build_checkpoint
            made[name], _ = build(tmp_path_factory.mktemp("pristine"), "llama-tied", shard=30_000, **options)
            tokenizer.save_pretrained(made[name])
            (made[name] / "recipe.yaml").write_text(dump_recipe(Recipe()))
        return made[name]

    return folder_of


class Overtime(BaseException):
    """Not an Exception, so that nothing on the way catches it."""


@contextmanager
def limits() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Overtime

    peak, before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    assert grown < BYTES, f"{grown >> 20} MB more"
    assert time.monotonic() - before < SECONDS


def state(model: Any) -> dict[str, torch.Tensor]:
    return {
        name: tensor.view(torch.uint8) if tensor.dim() else tensor
        for name, tensor in model.state_dict().items()
    }


def same(one: Any, two: Any) -> bool:
    ours, theirs = state(one), state(two)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def outcome(way: Callable[[Path], str], folder: Path) -> str:
    """What a way in answers; whatever is not a RequantError is a failure, and passes through."""
    try:
        return way(folder)
    except RequantError as error:
        sentence = str(error)
        assert sentence.isprintable() and len(sentence) < 1000, sentence[:200]
        return "refused"


def run_case(number: int, pristine: Callable[[str], Path], tmp_path: Path, loaded: dict[str, Any]) -> str:
    rng = random.Random(number)
    name, part = rng.choice(list(FORMATS)), list(PARTS)[number % len(PARTS)]
    folder = Path(shutil.copytree(pristine(name), tmp_path / "case"))
    PARTS[part](folder, rng)
    if name not in loaded:
        loaded[name] = load(pristine(name))

    def model(path: Path) -> str:
        found = load(path)
        if same(found, loaded[name]):
            return "equal"
        assert part in AS_WRITTEN, "another model, in silence"
        assert all(t.isfinite().all() for t in found.state_dict().values() if t.is_floating_point())
        return "as written"

    def by_transformers(path: Path) -> str:
        assert same(AutoModelForCausalLM.from_pretrained(path), loaded[name]), "another model, in silence"
        return "equal"

    def inspected(path: Path) -> str:
        text = inspection(path).text()
        assert all(line.isprintable() for line in text.splitlines())
        return "equal"

    def tokens(path: Path) -> str:
        tokenizer = load_tokenizer(resolve_source(str(path)))
        if part == "chat template":
            template = ChatTemplate(tokenizer, seconds=0.5)
            renderer = loaded.setdefault(
                "chat template", template
            )  # its process serves all cases that do not kill it
            renderer.template = template.template
            renderer.render(MESSAGES)
        return "equal"

    def settings(path: Path) -> str:
        load_recipe(str(path / "recipe.yaml"))
        return "equal"

    ways = {
        "recipe": [settings],
        "tokenizer": [tokens],
        "chat template": [tokens],
        "data": [model, inspected, by_transformers],
        "files": [model, inspected, tokens],
    }.get(part, [model, inspected])
    found = {way.__name__: outcome(way, folder) for way in ways}
    return f"{part}: {found.get('model') or min(found.values())}"


def run_cases(numbers: range | list[int], pristine: Callable[[str], Path], folder: Path) -> Counter[str]:
    """Outcomes by part; fails with the numbers of the cases that were neither refused nor right."""
    classes: Counter[str] = Counter()
    failures: list[str] = []
    loaded: dict[str, Any] = {}
    for number in numbers:
        here = folder / str(number)
        here.mkdir()
        try:
            with limits():
                classes[run_case(number, pristine, here, loaded)] += 1
        except (Exception, Overtime) as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            failures.append(f"case {number} ({list(PARTS)[number % len(PARTS)]}): {text}")
        finally:
            shutil.rmtree(here)
    sys.stdout.write(json.dumps(dict(sorted(classes.items())), indent=1))
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    return classes


def test_fifty_cases(pristine, tmp_path: Path) -> None:
    chosen = os.environ.get("FUZZ_CASES")
    numbers = [int(number) for number in chosen.split(",")] if chosen else range(50)
    classes = run_cases(numbers, pristine, tmp_path)
    if chosen is None:  # the fuzzer does damage, and the loader takes what is none
        assert sum(n for name, n in classes.items() if name.endswith("refused")) > 25
        assert sum(n for name, n in classes.items() if name.endswith("equal")) > 2


@pytest.mark.slow
def test_a_thousand_cases(pristine, tmp_path: Path) -> None:
    run_cases(range(1000, 2000), pristine, tmp_path)
