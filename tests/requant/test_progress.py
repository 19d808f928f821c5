"""The line of a whole run: its stages are those that are entered, its time left is what the pace so far says."""

import io
import logging
import re
import sys
import time
from pathlib import Path

import pytest

import requant
from requant import progress
from requant.cli.common import log_to_file
from requant.pipeline.planning.schedule import expected_stages
from requant.pipeline.preparation.prepare import prepare
from requant.progress import Stage
from requant.quantizers.registry import METHODS, PRUNING_METHODS
from requant.recipe.schema import Budget, Calibration, Detach, Evaluation, Finetune, Recipe
from requant.recipe.yaml_files import dump_recipe


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now[0])}))
    return now


PLANNED = (
    Stage(name="statistics", kind="statistics", seconds=10.0),
    Stage(name="round 1, training", kind="training", seconds=100.0),
    Stage(name="round 2, training", kind="training", seconds=200.0),
    Stage(name="scoring", kind="scoring", seconds=50.0),
)


def run_stage(clock: list[float], name: str, seconds: float, steps: int = 4) -> None:
    progress.enter(name)
    with progress.counted(steps, label="x", unit="steps") as counter:
        for _ in range(steps):
            clock[0] += seconds / steps
            counter.update()


def test_time_left_follows_what_stages_of_the_same_kind_took(clock) -> None:
    with progress.display(shown=False) as shown:
        assert shown.left is None
        progress.expect(PLANNED, memory=None)
        progress.enter("loading")  # was not planned
        assert shown.left == pytest.approx(360)
        run_stage(
            clock, "statistics", 20.0
        )  # twice the plan, which says something of the rest, beside a tenth of 360 s
        progress.enter("round 1, training")
        assert shown.left == pytest.approx((20 + 36) / (10 + 36) * 350)
        with progress.counted(100, label="training", unit="steps") as counter:
            clock[0] += 100.0  # a compiler
            counter.update()
            for _ in range(10):
                clock[0] += 0.5
                counter.update()
            # 89 steps at 0.5 s; round 2 as 149.5 s for 100, and a tenth of both rounds as all; scoring as all so far
            everything = (20 + 149.5 + 36) / (10 + 100 + 36)
            training = (149.5 + 30 * everything) / (100 + 30)
            assert shown.left == pytest.approx(89 * 0.5 + 200 * training + 50 * everything)
            clock[0] += 89 * 0.5
            counter.update(89)
        run_stage(clock, "round 2, training", 299.0)
        run_stage(clock, "scoring", 1.0)
        assert shown.left == 0.0


def test_what_an_earlier_run_did_says_nothing_of_the_pace(clock) -> None:
    with progress.display(shown=False) as shown:
        progress.expect(PLANNED, memory=None)
        progress.enter("statistics")  # read back
        clock[0] += 0.1
        progress.enter("round 1, training")
        with progress.counted(100, label="training", unit="steps", done=90) as counter:
            for _ in range(10):
                clock[0] += 3.0
                counter.update()
        progress.enter("round 2, training")  # a tenth of the work took 30 s of the 10 planned
        everything = (30 + 36) / (10 + 36)
        assert shown.left == pytest.approx((30 + 30 * everything) / (10 + 30) * 200 + everything * 50)


def test_a_short_first_stage_says_little_of_long_ones(clock) -> None:
    """Codes of a first round, for which a compiler was waited for, and of a second one, planned at ten times as long."""
    codes = [Stage(name=f"codes {i}", kind="codes", seconds=seconds) for i, seconds in enumerate((3, 30))]
    with progress.display(shown=False) as shown:
        progress.expect([Stage(name="statistics", kind="statistics", seconds=30), *codes], memory=None)
        run_stage(clock, "statistics", 30.0)
        run_stage(clock, "codes 0", 15.0)
        progress.enter("codes 1")
        assert shown.left is not None and 30 < shown.left < 100  # by the first codes alone it would be 150


def test_several_runs_are_one(clock) -> None:
    with progress.display(shown=False) as shown:
        progress.begin("2bit (1 of 3), ", runs_left=2)
        progress.expect(PLANNED, memory=lambda: 3 << 30)
        run_stage(clock, "statistics", 5.0)
        everything = (5 + 36) / (10 + 36)
        later, statistics = 350 * everything, 10 * (5 + everything) / (10 + 1)
        assert shown.left == pytest.approx(later + 2 * (statistics + later))
        assert shown.text == "2bit (1 of 3), stage 1 of 4: statistics, 15 min 47 s left, 3.0 GiB"


@pytest.mark.parametrize(
    ("mode", "method", "finetune"),
    [
        ("best", "kmeans", Finetune(steps=2, tokens_per_step=64)),
        pytest.param("best", "rtn", Finetune(steps=1, tokens_per_step=64, rounds=6), marks=pytest.mark.slow),
        ("paper", "kmeans", Finetune()),
        pytest.param("dense", "rtn", Finetune(steps=2, tokens_per_step=64), marks=pytest.mark.slow),
        ("sparse", "wanda", Finetune(steps=2, tokens_per_step=64)),
    ],
)
def test_the_stages_are_those_that_were_planned(
    tiny_folder, tiny_text_file: Path, caplog, mode: str, method: str, finetune: Finetune
) -> None:
    sparse = mode == "sparse"
    recipe = Recipe(
        model=str(tiny_folder("llama")),
        mode=mode,
        method=method,
        quantizer=(PRUNING_METHODS if sparse else METHODS)[method].config(),
        budget=Budget() if sparse else Budget(bits=4.5),
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=6, seq_len=32),
        evaluation=Evaluation(context=32, windows=2),
        finetune=finetune,
        detach=Detach(outlier_fraction=0.01, significant_fraction=0.01, temperatures=(1.0,), steps=1),
    )
    planned = [stage.name for stage in expected_stages(prepare(recipe.model, recipe), recipe, "cpu")]
    with caplog.at_level(logging.INFO, logger="requant.progress"):
        requant.quantize(recipe.model, recipe)
    entered = re.findall(r"stage (\d+) of (\d+): (.+?), \d+", caplog.text)
    assert entered == [(str(i + 1), str(len(planned)), name) for i, name in enumerate(planned)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("package_log")
def test_on_a_terminal_it_is_one_line_that_goes(monkeypatch, tmp_path: Path) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "BETWEEN_DRAWINGS", 0.0)
    printing = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [printing])
    log_to_file(tmp_path / "run.log")
    with progress.display(shown=True):
        progress.expect(PLANNED, memory=None)
        for stage in PLANNED:
            progress.enter(stage.name)
            for _ in progress.tracked(range(3), label="steps", unit="steps"):
                pass
    assert "stage 3 of 4" in (tmp_path / "run.log").read_text()  # and that it begins is not printed
    drawn = terminal.getvalue()
    assert "\n" not in drawn and drawn.split("\r")[-1] == ""
    assert re.search(r"\|.+\| stage 3 of 4: round 2, training, 2 of 3 steps, .+ left", drawn)


def test_elsewhere_it_is_a_line_a_minute(clock, capsys) -> None:
    with progress.display(shown=True):
        progress.expect(PLANNED, memory=None)
        run_stage(clock, "statistics", 50.0)
        assert capsys.readouterr().err == ""
        run_stage(clock, "round 1, training", 150.0, steps=150)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("requant: stage 2 of 4: round 1, training, 10 of 150 steps, ")
    with progress.display(shown=False):
        run_stage(clock, "statistics", 500.0)
    assert capsys.readouterr().err == ""


def test_elsewhere_short_stages_have_their_line_too(clock, capsys) -> None:
    """Stages of less than a minute, as on several GPUs."""
    with progress.display(shown=True):
        for _ in range(9):
            run_stage(clock, "codes", 20.0)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_log_says_what_stages_and_their_counters_took(clock, caplog) -> None:
    """Beside what was planned, so that a plan that is wrong can be mended from the log of one run."""
    with caplog.at_level(logging.INFO, logger="requant.progress"), progress.display(shown=False):
        progress.enter("loading")
        clock[0] += 2.0
        progress.expect(PLANNED, memory=None)
        run_stage(clock, "statistics", 30.0)
        clock[0] += 1.5
    assert [record.getMessage() for record in caplog.records if "stage 1" not in record.getMessage()][1:] == [
        "loading took 2.0 s",
        "x: 4 of 4 steps in 30.0 s",
        "statistics took 31.5 s, 10.0 s planned",
    ]


def test_without_a_run_there_is_a_plain_bar(monkeypatch, capsys) -> None:
    assert list(progress.tracked([1, 2], label="scoring", unit="batches")) == [1, 2]
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert list(progress.tracked([1, 2], label="scoring", unit="batches")) == [1, 2]
    assert "scoring:   0%" in terminal.getvalue()
    length = len(terminal.getvalue())
    assert list(progress.tracked([1, 2], label=None, unit="batches")) == [1, 2]
    assert len(terminal.getvalue()) == length


@pytest.fixture
def package_log():
    """The package's handlers and level as they were, afterwards."""
    package = logging.getLogger("requant")
    handlers, level = list(package.handlers), package.level
    yield
    for handler in set(package.handlers) - set(handlers):
        handler.close()
        package.removeHandler(handler)
    package.setLevel(level)


@pytest.mark.usefixtures("package_log")
def test_a_log_file_has_stages_and_the_end(cli, tiny_folder, tiny_text_file, tmp_path: Path) -> None:
    recipe = Recipe(
        model=str(tiny_folder("llama")),
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=4),
        calibration=Calibration(text=(str(tiny_text_file),), num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2),
    )
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe))
    log = tmp_path / "run.log"
    command = ["quantize", "--recipe", tmp_path / "r.yaml", "--output", tmp_path / "out", "--log-file", log]
    code, _, error = cli(*command, "--quiet")
    assert (code, error) == (0, "")
    lines = log.read_text().splitlines()
    assert all(re.match(rf"{time.strftime('%Y')}-\d\d-\d\d \d\d:\d\d:\d\d,\d\d\d ", line) for line in lines)
    assert any("stage 1 of 5: codes" in line for line in lines) and "writing took" in lines[-1]
    assert cli(*command)[0] == 2  # the output exists now: found before the log is opened
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe).replace("seq_len: 32", "seq_len: 99999"))
    code, _, error = cli(*command[:-3], tmp_path / "other", *command[-2:])
    assert code == 2 and error.removeprefix("requant: ").strip() in log.read_text()
    assert cli("sweep", "--bits", "2,3", "--log-file", tmp_path / "none" / "x")[0] == 2


@pytest.mark.usefixtures("package_log")
def test_sparsify_counts_what_it_compares_with(cli, tiny_folder, tiny_text_file, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    options = ["--calibration", tiny_text_file, "--num-samples", 2, "--seq-len", 32, "--method", "magnitude"]
    paths = ["--model", tiny_folder("llama"), "--output", tmp_path / "out", "--log-file", log]
    code, out, error = cli("sparsify", *paths, *options)
    assert code == 0, error
    entered = re.findall(r"stage (\d) of 6: (.+?), \d+", log.read_text())
    names = [
        "plain codes of the same bytes",
        "codes",
        "embedding and head",
        "diagnosis",
        "evaluation",
        "samples",
    ]
    assert entered == [(str(i + 1), name) for i, name in enumerate(names)]
    assert f"next: requant inspect {tmp_path / 'out'}" in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full")
def test_a_log_file_that_is_full_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, without logging's traceback for every line."""
    package = logging.getLogger("requant")
    monkeypatch.setattr(package, "handlers", [])
    monkeypatch.setattr(package, "level", package.level)
    log_to_file(Path("/dev/full"))
    package.info("first")
    package.info("second")
    with pytest.raises(OSError):  # what was not written yet
        package.handlers[0].close()
    error = capsys.readouterr().err
    assert error == "warning: --log-file /dev/full misses lines: [Errno 28] No space left on device\n"
