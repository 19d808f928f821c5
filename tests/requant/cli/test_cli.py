"""The commands, as a person types them."""

import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

import requant
from requant.cli import COMMANDS, app
from requant.cli.common import IMPORTED_AT_ONCE, importing, unfreeze_for_nanobind
from requant.recipe.options import Options
from requant.recipe.yaml_files import load_recipe

TINY = ("--num-samples", 2, "--seq-len", 64, "--quiet")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Default outputs go to the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (("--mode", "dense", "--method", "gptq", "--skip", "*.layers.[012].*"), "gptq"),
        pytest.param((), "trellis", marks=pytest.mark.slow),
    ],
    ids=["one of four blocks, quickly", "whole"],
)
def test_the_main_job_on_the_demo_model(cli, tmp_path: Path, options: tuple[str, ...], method: str) -> None:
    """Quantize, compare, inspect, generate: what the README shows."""
    code, out, error = cli("quantize", "--bits", 3, "--num-samples", 2, "--seq-len", 64, *options)
    assert code == 0, error
    folder = tmp_path / f"demo-{method}-3bit"
    assert "perplexity" in out and "bits per weight, matrices" in out and "peak memory" in out
    assert f"next: requant inspect demo-{method}-3bit" in out
    if options:  # the whole run takes minutes, and says once a minute where it is
        assert "stage" not in error, "progress where there is no terminal to show it"
    names = {file.name for file in folder.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "recipe.yaml",
        "report.html",
        "README.md",
    }
    assert sorted(tmp_path.iterdir()) == [folder]

    code, out, error = cli(
        "eval", "demo", folder, "--reference", "demo", "--context", 64, "--windows", 4, "-q"
    )
    assert code == 0, error
    assert out.startswith("token perplexity of demo-eval") and len(out.splitlines()) == 5
    code, again, _ = cli(
        "eval", "demo", folder, "--reference", "demo", "--context", 64, "--windows", 4, "-q", "--json"
    )
    rows = json.loads(again)
    assert code == 0 and [row["name"] for row in rows] == ["demo", str(folder)]
    assert rows[0]["quality"]["mean_kl"] == 0 < rows[1]["quality"]["mean_kl"] < 2
    assert 2.97 < rows[1]["bits_per_weight"] <= 3

    code, out, error = cli("inspect", folder)
    assert (
        code == 0 and "checksums verified: model.safetensors" in out and "model.layers.3.mlp.down_proj" in out
    )
    code, out, error = cli("inspect", folder, "--json")
    found = json.loads(out)
    assert sum(found["parts"].values()) == found["bytes"] == (folder / "model.safetensors").stat().st_size
    code, out, error = cli("generate", folder, "--prompt", "The city of", "--max-new-tokens", 5)
    assert code == 0 and out.startswith("The city of") and len(out) > len("The city of\n")


def test_generate_answers_a_message(cli, tiny_folder, tmp_path: Path) -> None:
    """The prompt goes through the chat template of the model, and is not printed."""
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "chatty"))
    few = ("--max-new-tokens", 6)
    code, _, error = cli("generate", folder, "--chat", "--prompt", "hi", *few)
    assert code == 2 and "no chat template" in error
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    (folder / "chat_template.jinja").write_text(template)
    code, answer, error = cli("generate", folder, "--chat", "--prompt", "hi", *few)
    assert code == 0, error
    _, whole, _ = cli("generate", folder, "--prompt", "[user]hi[assistant]", *few)
    assert whole == "[user]hi[assistant]" + answer


def test_dry_run_writes_nothing(cli, tmp_path: Path) -> None:
    code, out, error = cli("quantize", "--bits", 3, "--dry-run", *TINY)
    assert code == 0, error
    assert (
        "method          trellis (mul1), mode best, on cpu" in out
        and "output          demo-trellis-3bit" in out
    )
    assert (
        "calibration     demo (written by a model), 2 x 64 tokens" in out
        and "scored on       demo-eval" in out
    )
    assert "matrices        28 (4 q_proj" in out and "bits per weight 2.99" in out and "peak memory" in out
    code, out, _ = cli("quantize", "--bits", 3, "--method", "gptq", "--dry-run", "--json", *TINY)
    assert code == 0 and json.loads(out)["matrices"]["q_proj"] == 4
    assert list(tmp_path.iterdir()) == []


def test_sensitivity(cli, tiny_folder, tiny_text_file: Path, tmp_path: Path) -> None:
    arguments = (
        "sensitivity",
        "--model",
        tiny_folder("llama"),
        "--bits",
        3,
        "--calibration",
        tiny_text_file,
        *TINY,
    )
    code, out, error = cli(*arguments, "--nodes", "gauss4", "--output", "a")
    assert code == 0 and "--eval-text" not in error, error  # it scores no text, and has no such option
    assert out.splitlines()[0].split() == ["block", "gradient", "hessian", "pqi", "measured"]
    assert out.splitlines()[-1] == "scores, table and plot: a" and (tmp_path / "a" / "plot.svg").exists()
    code, out, _ = cli(*arguments, "--output", "b", "--json")
    assert code == 0 and [row["block"] for row in json.loads(out)] == ["0", "1", "model"]
    code, _, error = cli(*arguments, "--output", "b")
    assert code == 2 and "exists already" in error


def test_quantize_prints_json(cli, tiny_folder, tiny_text_file: Path) -> None:
    code, out, error = cli(
        "quantize", "--model", tiny_folder("llama"), "--bits", 4, "--method", "rtn", "--mode", "dense",
        "--calibration", tiny_text_file, "--output", "out", "--json", "--finetune-steps", 1, *TINY
    )  # fmt: skip
    assert code == 0, error
    found = json.loads(out)
    assert found["checkpoint"] == "out" and found["method"] == "rtn"
    assert found["budget"]["written"] <= found["budget"]["bytes"]
    assert found["bytes"]["after"] == Path("out/model.safetensors").stat().st_size
    recorded = json.loads(Path("out/report.json").read_text())
    assert found["bytes"] == {"before": recorded["bytes_before"], "after": recorded["bytes_after"]}
    assert (
        sum(recorded["sizes"].values()) == recorded["bytes_after"]
    )  # the report's table adds up to the file
    assert found["perplexity"]["after"] > 0 < found["mean_kl"] and found["seconds"] == sum(
        found["seconds_of"].values()
    )
    assert load_recipe("out/recipe.yaml").finetune.steps == 1


def test_the_python_call_takes_what_the_command_takes(cli, tiny_folder, tiny_text_file: Path) -> None:
    """The same options give the same recipe and the same bytes."""
    parameters = {parameter.name for parameter in typer.main.get_command(app).commands["quantize"].params}
    assert set(Options.__annotations__) - {"nodes"} <= parameters  # nodes: of the command `sensitivity`
    folder = str(tiny_folder("llama"))
    code, _, error = cli(
        "quantize", "--model", folder, "--bits", 4, "--method", "gptq", "--mode", "dense", "--group-size", 32,
        "--symmetric", "--calibration", tiny_text_file, "--output", "a", *TINY
    )  # fmt: skip
    assert code == 0, error
    result = requant.quantize(
        folder, bits=4, method="gptq", mode="dense", group_size=32, symmetric=True, calibration=tiny_text_file,
        num_samples=2, seq_len=64,
    )  # fmt: skip
    requant.save(result, "b")
    assert Path("a/recipe.yaml").read_text() == Path("b/recipe.yaml").read_text()
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    with pytest.raises(requant.RequantError, match="give one of them"):
        requant.quantize(folder, None, tiny_text_file, bits=4, calibration=tiny_text_file)


def test_for_a_program(cli, tiny_folder, tiny_text_file: Path) -> None:
    common = ("--calibration", tiny_text_file, "--num-samples", 2, "--seq-len", 64)
    arguments = (
        "quantize",
        "--model",
        tiny_folder("llama"),
        "--code-bits",
        4,
        "--for",
        "transformers",
        *common,
    )
    code, _, error = cli(*arguments)  # 172 columns are not a multiple of 128
    assert code == 2 and "down_proj has 172 columns in groups of 128, the last one shorter" in error
    code, out, error = cli(*arguments, "--group-size", -1, "--output", "out")
    assert code == 0, error
    following = out.splitlines()[-2].removeprefix("next: requant ")
    assert following == "export out --to transformers --output out-transformers"
    code, out, error = cli(*following.split())
    assert code == 0, error
    assert "zero points" not in error + Path("out-transformers/README.md").read_text()
    code, _, error = cli(*arguments, "--asymmetric", "--group-size", -1, "--output", "zero")
    assert code == 0 and cli("export", "zero", "--to", "vllm", "--output", "zero-vllm")[0] == 0
    assert "CompressedTensorsConfig(dequantize=True)" in Path("zero-vllm/README.md").read_text()
    code, _, error = cli(
        "quantize", "--model", tiny_folder("gpt2"), "--code-bits", 4, "--for", "llama.cpp", *common
    )
    assert code == 2 and "leave --for llama.cpp out: GGUF export knows llama" in error
    mixture = ("--model", tiny_folder("qwen3-moe"), "--code-bits", 4, "--group-size", -1, "--for", "vllm")
    for skip in ((), ("--skip", "*.experts.*")):  # the export refuses it either way
        code, _, error = cli("quantize", *mixture, *skip, *common)
        assert code == 2 and "this model is a mixture of experts, whose exported form" in error
        assert "leave --for out, and export --to dense" in error and "--group-size" not in error


def test_dir_shows_the_api() -> None:
    assert dir(requant) == sorted(requant.__all__) and "quantize" in dir(requant)
    assert all(getattr(requant, name) for name in dir(requant))


def test_help_lists_options_by_panel(cli) -> None:
    code, out, _ = cli("quantize", "--help")
    assert code == 0
    panels = [line.rstrip(":") for line in out.splitlines() if line.endswith(":") and line[0] != " "]
    assert panels == ["The recipe", "Calibration and evaluation", "The run", "What is printed", "Options"]
    assert out.index("Calibration and evaluation:") < out.index("--num-samples") < out.index("The run:")


def test_recipes_and_version(cli) -> None:
    code, out, _ = cli("recipes")
    assert code == 0 and "demo-3bit" in out and "demo-kmeans-3bit-codes" in out
    code, out, _ = cli("recipes", "--json")
    assert code == 0 and {row["recipe"] for row in json.loads(out)} >= {"demo-3bit"}
    assert cli("--version") == (0, f"requant {requant.__version__}\n", "")
    code, out, _ = cli("--help")
    assert code == 0 and "quantize" in out and "inspect" in out


def test_summaries_of_commands_fit_a_terminal(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = cli("--help")
    summaries = out.split("Commands:\n")[1].splitlines()
    assert len(summaries) == len(COMMANDS) and not any(line.endswith("...") for line in summaries)


def test_no_command_shows_help(cli) -> None:
    code, out, error = cli()
    assert code in (0, 2) and "Usage" in out + error and "Traceback" not in error


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys, requant.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["demo-3bit", "demo-lut-3bit", "demo-rtn-4bit-codes", "demo-gptq-4bit-codes", "demo-awq-4bit-codes"],
)
def test_shipped_recipes_of_the_demo_run(cli, name: str, tmp_path: Path) -> None:
    code, _, error = cli("quantize", "--recipe", name, "--output", "out", "--quiet")
    assert code == 0, error
    assert "warning" not in error


def test_what_the_terminal_cannot_show_is_escaped() -> None:
    script = "from requant import cli; cli.app = lambda: print('0.15 \\xb1 \\u65e5'); cli.main()"
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert done.stdout == b"0.15 \xb1 \\u65e5\n"


ALLOCATOR = """
import os, sys
from requant import cli

cli.app = lambda: print(os.environ.get("PYTORCH_ALLOC_CONF"), "torch" in sys.modules)
cli.main()
"""


@pytest.mark.parametrize(
    ("command", "own", "setting"),
    [
        ("quantize", {}, "expandable_segments:True"),
        ("quantize", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
        ("quantize", {"PYTORCH_CUDA_ALLOC_CONF": ""}, "None"),
        ("generate", {}, "None"),
    ],
)
def test_memory_of_a_gpu_grows_in_place_unless_the_user_says_otherwise(
    command: str, own: dict[str, str], setting: str
) -> None:
    """What torch reads when it is imported is set before."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names} | own
    script = [sys.executable, "-c", ALLOCATOR, command]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [setting, "False"]


def test_imports_collect_little_garbage_and_leave_their_objects_out_of_later_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers.modeling_utils  # noqa: F401

    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with importing():  # all is imported here: a freeze would keep what a run before left
        assert (gc.get_threshold(), gc.get_freeze_count()) == (before, frozen)
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    try:
        with pytest.raises(ImportError), importing():
            assert gc.get_threshold()[0] == IMPORTED_AT_ONCE > before[0]
            raise ImportError
        assert gc.get_threshold() == before and gc.get_freeze_count() > frozen + 1000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("built_with", "unfreezes"), [("nanobind", 1), ("pybind11_builtins", 0)])
def test_what_is_frozen_is_freed_where_nanobind_would_report_it(
    monkeypatch: pytest.MonkeyPatch, built_with: str, unfreezes: int
) -> None:
    kind = type("kind", (type,), {"__module__": built_with})
    library = SimpleNamespace(ir=SimpleNamespace(module=kind("module", (), {})))
    calls: list[None] = []
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append(None))
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", library)
    unfreeze_for_nanobind()
    monkeypatch.delitem(sys.modules, "triton._C.libtriton")
    unfreeze_for_nanobind()
    assert len(calls) == unfreezes


def test_transformers_only_says_what_fails() -> None:
    """It is imported after the commands have set that, and would print a table on each model with a tensor too few."""
    script = (
        "from requant.cli.common import log_to_stderr; log_to_stderr(False); "
        "from transformers.utils import logging; print(logging.get_verbosity() == logging.ERROR)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"
