"""What cannot be done: one sentence, an exit code, before long work, and nothing left behind."""

import inspect
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file, save_file

import requant
from requant.cli import COMMANDS, RESUMABLE, app
from requant.cli.common import log_to_stderr
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Recipe
from requant.run.workspace import Workspace

pytestmark = pytest.mark.usefixtures("elsewhere")

TINY = ("--num-samples", 2, "--seq-len", 64, "--quiet")


@pytest.fixture
def refused(cli, tmp_path: Path):
    """`refused(*arguments)`: the one sentence on stderr of a command that fails and leaves nothing behind."""

    def run(*arguments: object, code: int = 2) -> str:
        before = sorted(tmp_path.rglob("*"))
        found, out, error = cli(*arguments)
        assert (found, out) == (code, ""), error
        assert "Traceback" not in error and error.startswith("requant: ") and error.count("\n") == 1, error
        assert sorted(tmp_path.rglob("*")) == before
        return error

    return run


@pytest.fixture(scope="module")
def checkpoint(tiny_folder, tiny_text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(
        mode="dense",
        method="rtn",
        quantizer=METHODS["rtn"].config(bits=3),
        calibration=Calibration(num_samples=2, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
    )
    result = requant.quantize(str(tiny_folder("llama")), recipe, tiny_text_file)
    return requant.save(result, tmp_path_factory.mktemp("cli") / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bits", "0.5"), "--bits 0.5 is out of range; give 1 to 8, like 3 or 2.25."),
        (("--bits", "9"), "--bits 9 is out of range; give 1 to 8, like 3 or 2.25."),
        (("--size", "10XB"), "--size 10XB is not a size; give a number of bytes"),
        (("--bits", "3", "--gpu-memory", "24XB"), "--gpu-memory 24XB is not a size; give a number of bytes"),
        (
            ("--bits", "3", "--gpu-memory", "24GB", "--device", "cpu"),
            "--gpu-memory limits a GPU, and this run is on cpu; leave it out.",
        ),
        (("--bits", "3", "--size", "1MB"), "--bits, --code-bits and --size exclude one another"),
        (
            ("--bits", "1.5", "--method", "lut", "--quiet"),
            "--bits 1.5 cannot be met: the smallest that method 'lut' makes of this model is 2.",
        ),
        (
            ("--size", "1MB", "--method", "lut", "--quiet"),
            "--size 1,000,000 cannot be met: the smallest checkpoint that method 'lut'",
        ),
        (
            ("--size", "1GB", "--method", "lut", "--quiet"),
            "--size 1,000,000,000 cannot be met: the largest checkpoint that method 'lut'",
        ),
        (("--bits", "3", "--head-bits", "9"), "head_bits is 9"),
        (("--bits", "x"), "--bits x is not a number"),
        ((), "say how many bits"),
        (
            ("--bits", "3", "--model", "dema"),
            "'dema' is neither a folder nor an alias (did you mean 'demo'?)",
        ),
        (("--bits", "3", "--model", "./absent"), "./absent is not a folder; check the path"),
        (("--bits", "3", "--method", "kmean"), "method 'kmean' is unknown (did you mean 'kmeans'?)"),
        (("--bits", "3", "--mode", "papr"), "mode is 'papr' (did you mean 'paper'?)"),
        (
            ("--recipe", "demo-3bit", "--mode", "sparse"),
            "recipe demo-3bit has mode best, and method trellis does not",
        ),
        (("--bits", "3", "--sensitivity", "pqr"), "score is 'pqr' (did you mean 'pqi'?)"),
        (("--recipe", "demo-3bits"), "(did you mean 'demo-3bit'?)"),
        (("--recipe", "absent.yaml"), "'absent.yaml' is neither a file nor a recipe"),
        (("--bits", "3", "--calibration", "absent.txt"), "there is no file absent.txt"),
        (("--bits", "3", "--calibration", "absent.csv"), "there is no file absent.csv"),  # no data set's name
        (("--bits", "3", "--calibration", ""), "a text has an empty name: give a file"),
        (("--bits", "3", "--eval-text", "absent.txt"), "there is no file absent.txt"),
        (("--bits", "3", "--skip", "nothing"), "--skip nothing matches no matrix"),
        (("--bits", "3", "--seq-len", "4096"), "--seq-len 4096 is longer than the model's 2048 positions"),
        (("--bits", "3", "--seq-len", "3"), "calibration.seq_len is 3; it takes 8 or more"),
        (("--bits", "3", "--num-samples", "0"), "calibration.num_samples is 0; it takes 1 to 1,000,000"),
        (("--bits", "3", "--device", "gpu"), "--device gpu is unknown; give auto, cpu, cuda"),
        (
            ("--bits", "3", "--dtype", "int4"),
            "--dtype int4 is unknown; give auto, float32, bfloat16, float16",
        ),
    ],
)
@pytest.mark.parametrize("dry_run", [False, True])
def test_what_cannot_be_done_is_one_sentence(
    refused, arguments: tuple[str, ...], message: str, dry_run: bool
) -> None:
    assert message in refused("quantize", *arguments, *(["--dry-run"] if dry_run else []))


@pytest.mark.parametrize("command", [("sweep", "--bits", "2,3"), ("sparsify",)])
def test_a_limit_of_gpu_memory_needs_a_gpu(refused, command: tuple[str, ...]) -> None:
    arguments = (*command, "--device", "cpu", "--gpu-memory")
    assert "--gpu-memory limits a GPU, and this run is on cpu; leave it out." in refused(*arguments, "24GB")
    assert "--gpu-memory 24XB is not a size" in refused(*arguments, "24XB")


@pytest.mark.parametrize("length", [241, 300])
def test_names_that_are_too_long(refused, length: int) -> None:
    """Also one whose hidden folder alone would be: it is refused before the work."""
    name = length * "a"
    for command in (
        ("quantize", "--bits", 3),
        ("sensitivity", "--bits", 3),
        ("export", "demo", "--to", "dense"),
    ):
        for output in (name, f"new/folder/{name}"):
            assert "File name too long" in refused(*command, "--output", output)
    if length > 255:
        model = ("quantize", "--bits", 3, "--output", "out", "--model", name)
        assert "is neither a folder nor an alias" in refused(*model)
        assert "is neither a file nor a recipe" in refused("quantize", "--recipe", name)
        assert "is not a folder" in refused("inspect", name)


@pytest.mark.parametrize("command", ["quantize", "sweep", "sparsify", "sensitivity"])
def test_a_model_without_its_option(cli, command: str) -> None:
    code, _, error = cli(command, "demo", "--bits", "3")
    assert code == 2 and "(demo); the model is given as --model MODEL." in error
    code, _, error = cli("inspect", "one", "two")
    assert code == 2 and "(two)" in error and "--model" not in error


def test_bits_that_modules_fix(refused) -> None:
    said = refused("quantize", "--dry-run", "--bits", 4, "--method", "rtn", "--module", "*:bits=8")
    assert "bits per weight, all stored bytes counted; fix fewer bits." in said


def test_a_key_is_given_once(refused, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("method: rtn\nquantizer: {bits: 4, group_size: 64, bits: 3}\n")
    assert "the key bits twice in one place" in refused("quantize", "--recipe", "own.yaml")
    (tmp_path / "own.yaml").write_text("method: rtn\nskip: [method]\nmethod: gptq\n")
    assert "the key method twice in one place" in refused("quantize", "--recipe", "own.yaml")


def test_a_prompt_that_is_no_text(refused) -> None:
    assert "--prompt is not UTF-8" in refused("generate", "demo", "--prompt", "\udcff")


def test_wrong_recipe_keys(refused, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("calibration: {seqlen: 3}\n")
    assert "own.yaml: calibration: unknown key 'seqlen' (did you mean 'seq_len'?)" in refused(
        "quantize", "--recipe", "own.yaml"
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "empty.txt holds no text"),
        ("blank.txt", " \n\n ", "blank.txt holds no text"),
        ("short.txt", "A few words.", "and one window needs 64: lower --seq-len"),
        ("odd.jsonl", '{"body": "x"}', "has no field 'text': choose one of 'body'"),
        ("odd.doc", "x", "odd.doc ends in .doc: use one of .txt"),
        ("odd.jsonl", "not json", "line 1 is not JSON"),
    ],
)
def test_texts_that_do_not_do(refused, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    assert message in refused("quantize", "--bits", 3, "--calibration", name, *TINY)


def test_text_that_is_calibrated_and_scored_is_said(cli, tiny_folder, tiny_text_file: Path, caplog) -> None:
    code, _, _ = cli(
        "quantize", "--model", tiny_folder("llama"), "--bits", 3, "--calibration", tiny_text_file,
        "--eval-text", tiny_text_file, "--dry-run", *TINY
    )  # fmt: skip
    assert code == 0 and "is also in the calibration text" in caplog.text


def test_outputs_that_cannot_be(refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(
        "requant.pipeline.preparation.open_model.load_model", lambda *args, **kwargs: pytest.fail("worked")
    )
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    assert "there exists already; remove it, or choose another --output" in refused(
        "quantize", "--bits", 3, "--output", "there"
    )
    assert "file cannot be written to" in refused("quantize", "--bits", 3, "--output", "file/out")
    assert "exists already" in refused("sensitivity", "--bits", 3, "--output", "there")
    for here in ("", ".", "..", "there/.."):  # nobody should remove the folder that they are in
        sentence = refused("quantize", "--bits", 3, "--output", here)
        assert "exists already; give --output the name of a new folder" in sentence


def test_the_home_of_a_user_who_is_unknown(refused, tmp_path: Path) -> None:
    """Python's pathlib raises a RuntimeError for it."""
    (tmp_path / "~nobody-of-that-name").write_text("")
    for option, command in (
        ("--output", ("quantize", "--bits", 3)),
        ("--output", ("sweep", "--bits", "2,3")),
        ("--output", ("export", "demo", "--to", "dense")),
        ("--log-file", ("quantize", "--bits", 3)),
    ):
        sentence = refused(*command, option, "~nobody-of-that-name/there")
        assert "~nobody-of-that-name" in sentence and "cannot be written" in sentence
    assert "is not a folder" in refused("quantize", "--bits", 3, "--model", "~nobody-of-that-name/there")


def test_a_partial_folder_of_somebody_else_stays(
    refused, tiny_folder, tiny_text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("precious")
    assert "out.partial holds thesis.txt, which no run of requant wrote" in refused(
        "quantize",
        "--model",
        tiny_folder("llama"),
        "--bits",
        3,
        "--calibration",
        tiny_text_file,
        "--output",
        "out",
        *TINY,
    )


def test_a_mistyped_command_does_not_delete_what_can_be_resumed(refused, tmp_path: Path) -> None:
    Workspace(tmp_path / "out.partial").put("linear", "ab" * 32, value=1)
    refused("quantize", "--bits", 3, "--calibration", "absent.txt", "--output", "out")
    assert Workspace(tmp_path / "out.partial", resume=True).get("linear", "ab" * 32).value == 1


def test_nan_in_the_weights(refused, tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_folder("llama"), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    error = refused("quantize", "--model", "model", "--bits", 3, "--calibration", tiny_text_file, *TINY)
    assert "model.layers.0.mlp.up_proj.weight holds NaN or infinity" in error


def test_experts_of_an_unknown_layout(refused, tiny_folder, tiny_text_file: Path) -> None:
    error = refused(
        "quantize", "--model", tiny_folder("dbrx"), "--bits", 3, "--calibration", tiny_text_file, *TINY
    )
    assert "ffn.experts.mlp.w1 [128, 64] holds experts in a layout that requant does not know" in error


@pytest.mark.parametrize("command", ["quantize", "sensitivity"])
def test_a_missing_budget_is_asked_for_in_options_that_the_command_has(refused, command: str) -> None:
    sentence = refused(command)
    named = set(re.findall(r"--[a-z-]+", sentence))
    assert "say how many bits" in sentence and "--bits" in named
    known = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    assert named <= {option for parameter in known for option in parameter.opts}


def test_commands_that_can_be_resumed_are_known() -> None:
    signatures = {name: inspect.signature(command).parameters for name, command in COMMANDS.items()}
    assert set(RESUMABLE) == {name for name, parameters in signatures.items() if "resume" in parameters}


def test_damaged_checkpoints(refused, checkpoint: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert "has sha256" in refused("inspect", "copy")
    (copy / "model.safetensors").write_bytes(data[:-1000])
    for command in (
        ("inspect", "copy"),
        ("generate", "copy", "--prompt", "x"),
        ("eval", "copy", "--text", "demo-eval"),
    ):
        refused(*command)
    (copy / "config.json").write_text("{")
    for command in (
        ("inspect", "copy"),
        ("generate", "copy", "--prompt", "x"),
        ("eval", "copy", "--text", "demo-eval"),
    ):
        assert "config.json" in refused(*command)


def test_a_model_quantized_by_another_program_is_refused(refused, tiny_folder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "gptq"))
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "gptq"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ("quantize", "--model", folder, "--bits", 3, "--calibration", "demo")
    for command in (
        arguments,
        (*arguments, "--dry-run", "--gpus", 1),
        ("eval", folder, "--text", "demo-eval"),
    ):
        assert "is quantized already (quant_method gptq); give the original model" in refused(*command)


def test_other_commands_refuse_in_one_sentence(refused, checkpoint: Path, tiny_folder) -> None:
    assert "is neither a folder nor an alias" in refused("eval", "dema")
    assert "there is no file absent.txt" in refused("eval", checkpoint, "--text", "absent.txt")
    assert "longer than the model's 128 positions" in refused(
        "eval", checkpoint, "--text", "demo-eval", "--context", 256
    )
    assert "--prompt holds no token" in refused("generate", checkpoint, "--prompt", "")
    assert "exceed the model's 128 positions" in refused(
        "generate", checkpoint, "--prompt", "a", "--max-new-tokens", 999
    )
    refused("inspect", tiny_folder("llama"))
    refused("inspect", "absent")
    assert "is quantized already (quant_method requant); give the original model" in refused(
        "quantize", "--model", checkpoint, "--bits", 3, "--calibration", "demo"
    )


@pytest.mark.parametrize("command", [("eval",), ("bench",), ("compare", "--output", "page.html")])
def test_what_transformers_reports_of_a_load_is_not_shown(cli, command: tuple[str, ...]) -> None:
    """Tables of dozens of lines, before the sentence that says what is wrong."""
    logging.getLogger("transformers").setLevel(logging.WARNING)
    assert cli(*command, "absent-model")[0] == 2
    assert logging.getLogger("transformers").level == logging.ERROR


def test_more_processes_than_a_host_has_gpus_are_a_usage_error(cli) -> None:
    code, _, error = cli("quantize", "--bits", 3, "--gpus", 10**20, "--dry-run")
    assert code == 2 and "--gpus" in error and "1024" in error


@pytest.mark.parametrize(
    "arguments",
    [("quantise",), ("quantize", "--bit", "3"), ("eval",), ("eval", "demo", "--windows", "0"), ("generate", "demo"),
     ("quantize", "--bits", "3", "--num-samples", "many"), ("inspect",)],
)  # fmt: skip
def test_usage_errors(cli, arguments: tuple[str, ...]) -> None:
    code, out, error = cli(*arguments)
    assert (code, out) == (2, "") and "Usage" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "renamed"),
    [
        (("quantize", "--tune", "3"), "--finetune-steps"),
        (("bench", "x", "--tune"), "--autotune"),
        (("bench", "x", "--against", "y"), "--reference"),
        (("compare", "x", "--against=y"), "--reference"),
        (("eval", "x", "--against", "y"), "--reference"),
    ],
)
def test_renamed_options_answer_with_the_new_spelling(cli, arguments, renamed: str) -> None:
    code, out, error = cli(*arguments)
    assert code == 2 and out == "" and f"is called {renamed} now." in error and "\n" not in error.strip()


def test_a_warning_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    log_to_stderr(verbose=False)
    for name in ("wiki.txt", "wiki.txt", "c4.txt"):
        logging.getLogger("requant.pipeline.preparation.prepare").warning("%s is short", name)
    assert capsys.readouterr().err == "requant: wiki.txt is short\nrequant: c4.txt is short\n"
