"""One line of progress for a whole run: its stage, the step within the stage, the total time left, memory.

    |█████       | stage 5 of 12: round 2 of 6, training, 120 of 300 steps, 4 min 10 s left, 3.1 GiB

The time left is estimated for the present stage from the pace of its steps, if it has any, and for later stages from the
plan (`Stage.seconds`), times the ratio of what stages of the same kind have taken so far to what was expected of them:

    factor(kind) = (took(kind) + p(kind) f) / (expected(kind) + p(kind)),    f = (took + p) / (expected + p)

with p = PRIOR times what is planned for the kind, or for the whole run: a first stage of a few seconds, which may have
waited for a compiler, says little about hours.

On a terminal tqdm redraws the line in place and removes it at the end. Elsewhere a line is written at most once per minute.
For `--log-file` every stage is logged as well, a line per minute, and what each stage and each of its counters took. If no
run is displayed, `counted` and `tracked` draw a plain bar on a terminal: they do not know what they are part of.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from requant.display import format_bytes, format_seconds

T = TypeVar("T")
PRIOR = 0.1
BETWEEN_LINES = 60.0  # seconds, in a log
BETWEEN_DRAWINGS = 0.2  # seconds, on a terminal
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a run as it was planned; `kind` is what its time is proportional to, with others of the same kind."""

    name: str
    kind: str
    seconds: float
    bars: int = 1  # counters that follow each other in it; 0: who knows


@dataclass(kw_only=True)
class Counter:
    """How much of something is done; the pace is that since the first update, before which there may be a warm-up."""

    label: str
    unit: str
    total: int
    done: int = 0
    note: str = ""
    fraction: float = 1.0  # of all that is done here, and not by an earlier run
    first: tuple[float, int] | None = None  # time and count of the first update
    last: float = 0.0
    bar: Any = None  # tqdm's, where no run is displayed

    def update(self, count: int = 1, notes: Mapping[str, str] | None = None) -> None:
        """`count` more are done; `notes` are shown until the next ones."""
        self.done += count
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last, self.done
        if notes:
            self.note = " ".join(f"{name} {value}" for name, value in notes.items())
        if self.bar is not None:
            if notes:
                self.bar.set_postfix(notes, refresh=False)
            self.bar.update(count)
        elif _display is not None:
            _display.refresh()

    @property
    def left(self) -> float | None:
        """Seconds; None before the second update."""
        if self.first is None or self.done <= self.first[1]:
            return None
        return (self.last - self.first[0]) / (self.done - self.first[1]) * (self.total - self.done)

    @property
    def text(self) -> str:
        return f"{self.done} of {self.total} {self.unit}".strip() + (f", {self.note}" if self.note else "")


@dataclass(kw_only=True)
class _Passed:
    """What is known of the present stage, and then of one that is over."""

    stage: Stage | None
    start: float
    bars: int = 0  # that are over
    worked: bool = False  # a stage that an earlier run finished does not, and says nothing of the pace
    fraction: float = 1.0  # of the stage's work that is done in this run
    seconds: float = 0.0


@dataclass(kw_only=True)
class Display:
    """The progress of a run, or of several in a row (`begin`)."""

    shown: bool
    stages: Sequence[Stage] = ()
    memory: Callable[[], int] | None = None
    title: str = ""  # of one run of several
    runs_left: int = 0  # like this one, after it
    index: int = -1  # of the present stage; -1: it was not planned
    name: str = ""
    present: _Passed | None = None
    passed: list[_Passed] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)  # the innermost last
    start: float = field(default_factory=time.monotonic)
    drawn: float = 0.0
    logged: float = field(default_factory=time.monotonic)
    written: float = field(default_factory=lambda: time.monotonic())  # to stderr, where it is not a terminal
    line: Any = None  # tqdm's, on a terminal

    def begin(self, title: str, *, runs_left: int) -> None:
        """The next of several runs that are alike; the pace of those before goes for it."""
        self.close_stage()
        self.title, self.runs_left = title, runs_left
        self.stages, self.index, self.start = (), -1, time.monotonic()

    def expect(self, stages: Sequence[Stage], memory: Callable[[], int] | None) -> None:
        """The stages of the run that has begun, unless whoever began it knew them."""
        if not self.stages:
            self.stages = stages
        self.memory = memory

    def enter(self, name: str) -> None:
        """The stage of this name begins: the next of this name that was planned."""
        self.close_stage()
        coming = range(self.index + 1, len(self.stages))
        self.index = next((i for i in coming if self.stages[i].name == name), self.index)
        planned = self.index >= 0 and self.stages[self.index].name == name
        self.name = name
        self.present = _Passed(stage=self.stages[self.index] if planned else None, start=time.monotonic())
        logger.info("%s", self.text)
        self.logged = time.monotonic()
        self.refresh(force=True)

    def close_stage(self) -> None:
        """The present stage is over."""
        if self.present is not None:
            self.present.seconds = time.monotonic() - self.present.start
            self.passed.append(self.present)
            planned = self.present.stage
            expected = f", {planned.seconds:.1f} s planned" if planned is not None and planned.seconds else ""
            logger.info("%s%s took %.1f s%s", self.title, self.name, self.present.seconds, expected)
        self.present = None

    def refresh(self, *, force: bool = False) -> None:
        """Show where the run stands, if it is time to."""
        now = time.monotonic()
        if self.line is not None and (force or now - self.drawn >= BETWEEN_DRAWINGS):
            left = self.left
            elapsed = now - self.start
            self.line.n = 0.0 if left is None else elapsed / max(elapsed + left, 1e-9)
            self.line.set_description_str(self.text)
            self.drawn = now
        if now - self.logged >= BETWEEN_LINES:
            logger.info("%s", self.text)
            self.logged = now
        if now - self.written >= BETWEEN_LINES:  # however many stages began since
            if self.shown and self.line is None and not logging.getLogger().isEnabledFor(logging.INFO):
                sys.stderr.write(f"requant: {self.text}\n")
            self.written = now

    @property
    def text(self) -> str:
        """The line without its bar."""
        number = f"stage {self.index + 1} of {len(self.stages)}: " if self._planned else ""
        parts = [f"{self.title}{number}{self.name}"]
        if self.counters:
            counter = self.counters[-1]
            alone = len(self.counters) == 1 and self._planned is not None and self._planned.bars == 1
            parts.append(counter.text if alone else f"{counter.label} {counter.text}")
        if (left := self.left) is not None:
            parts.append(f"{format_seconds(max(1, round(left)))} left")
        if self.memory is not None:
            parts.append(format_bytes(self.memory()))
        return ", ".join(parts)

    @property
    def _planned(self) -> Stage | None:
        return None if self.present is None else self.present.stage

    @property
    def left(self) -> float | None:
        """Seconds of all that is to come; None while nothing is planned."""
        if not self.stages or self.present is None:
            return None
        later = sum(stage.seconds * self._correction(stage) for stage in self.stages[self.index + 1 :])
        one_run = sum(stage.seconds * self._correction(stage) for stage in self.stages)
        return self._left_of_stage() + later + self.runs_left * one_run

    def _left_of_stage(self) -> float:
        present = self.present
        assert present is not None
        stage, elapsed = present.stage, time.monotonic() - present.start
        pace = self.counters[0].left if self.counters else None
        expected = 0.0 if stage is None else max(0.0, stage.seconds * self._correction(stage) - elapsed)
        if stage is not None and 0 < stage.bars <= present.bars:
            return 0.0
        if pace is None:
            return expected
        if stage is None or not stage.bars:
            return max(pace, expected)
        bars = present.bars + 1
        return pace + max(0, stage.bars - bars) * (elapsed + pace) / bars

    def _correction(self, stage: Stage) -> float:
        """The factor of the module's text."""
        seen = [
            (each.stage, each.seconds, each.fraction) for each in self.passed if each.worked and each.stage
        ]
        if self.present is not None and (of_present := self._pace_of_present(self.present)) is not None:
            seen.append(of_present)
        took = expected = PRIOR * sum(each.seconds for each in self.stages)
        if not took:
            return 1.0
        prior_alike = PRIOR * sum(each.seconds for each in self.stages if each.kind == stage.kind)
        took_alike = expected_alike = 0.0
        for other, seconds, fraction in seen:
            took, expected = took + seconds, expected + other.seconds * fraction
            if other.kind == stage.kind:
                took_alike, expected_alike = took_alike + seconds, expected_alike + other.seconds * fraction
        everything = took / expected
        if not expected_alike:
            return everything
        return (took_alike + prior_alike * everything) / (expected_alike + prior_alike)

    def _pace_of_present(self, present: _Passed) -> tuple[Stage, float, float] | None:
        """The present stage, how long it will have taken, and of what fraction; None where there is no saying yet."""
        if present.stage is None or present.stage.bars != 1:
            return None
        elapsed = time.monotonic() - present.start
        if present.bars:
            return present.stage, elapsed, present.fraction
        left = self.counters[0].left if self.counters else None
        return None if left is None else (present.stage, elapsed + left, self.counters[0].fraction)


_display: Display | None = None


@contextmanager
def display(*, shown: bool) -> Iterator[Display]:
    """The progress of the run that is made in this context; inside another such context that one."""
    global _display
    if _display is not None:
        yield _display
        return
    with ExitStack() as stack:
        _display = Display(shown=shown)
        if shown and sys.stderr.isatty():
            root = logging.getLogger()
            levels = [each.level for each in root.handlers if isinstance(each, logging.StreamHandler)]
            stack.enter_context(logging_redirect_tqdm())
            root.handlers[-1].setLevel(min(levels, default=logging.NOTSET))  # it forgets the level
            _display.line = stack.enter_context(
                tqdm(
                    total=1.0,
                    bar_format="|{bar:12}| {desc}",
                    leave=False,
                    dynamic_ncols=True,
                    file=sys.stderr,
                )
            )
        try:
            yield _display
        finally:
            _display.close_stage()
            _display = None


def expect(stages: Sequence[Stage], *, memory: Callable[[], int] | None) -> None:
    """What the run that is displayed will do, unless whoever began it knew."""
    if _display is not None:
        _display.expect(stages, memory)


def begin(title: str, *, runs_left: int) -> None:
    """The next of several runs that are displayed together."""
    if _display is not None:
        _display.begin(title, runs_left=runs_left)


def enter(stage: str) -> None:
    """The stage of this name begins, in the run that is displayed."""
    if _display is not None:
        _display.enter(stage)


@contextmanager
def counted(total: int, *, label: str | None, unit: str, done: int = 0) -> Iterator[Counter]:
    """Count up to `total` while the context lasts, from `done`, which an earlier run did; None as the label: silently."""
    counter = Counter(label=label or "", unit=unit, total=total, done=done)
    counter.fraction = 1 - done / max(1, total)
    if label is None or total == done:
        counter.bar = tqdm(disable=True)
        yield counter
        return
    run = _display
    if run is None:
        with tqdm(total=total, initial=done, desc=label, unit=unit, leave=False, disable=None) as counter.bar:
            yield counter
        return
    run.counters.append(counter)
    run.refresh()
    begun = time.monotonic()
    try:
        yield counter
    finally:
        logger.info("%s: %s in %.1f s", counter.label, counter.text, time.monotonic() - begun)
        run.counters.remove(counter)
        if not run.counters and run.present is not None:
            run.present.bars += 1
            run.present.worked = True
            run.present.fraction = counter.fraction


def tracked(items: Sequence[T], *, label: str | None, unit: str) -> Iterable[T]:
    """The items one by one, each counted when the next is asked for."""
    with counted(len(items), label=label, unit=unit) as counter:
        for item in items:
            yield item
            counter.update()
