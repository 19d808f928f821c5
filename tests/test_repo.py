"""What holds for the repository as a whole."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import typer

from requant.cli import app
from requant.models.loading import ALIASES
from requant.quantizers.registry import METHODS
from requant.recipe.yaml_files import available_recipes, load_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = ("requant", "kernels", "tests", "eval", "recipes")
TEXT = {".py", ".md", ".yaml", ".toml", ".html", ".yml", ".json", ".cfg"}


def files(*suffixes: str) -> list[Path]:
    """Files of the project, whether committed yet or not."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(p for p in found if p.suffix in suffixes and "__pycache__" not in p.parts)


@pytest.mark.parametrize("path", files(".py"), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    if "tests" not in path.parts:
        assert ast.get_docstring(ast.parse(source)), "no module docstring"


def test_readme_names_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", readme) if "://" not in link]
    # In the file map `a/b.py`, `c.py` stands for a/c.py.
    missing = [link for link in links if not (ROOT / link).exists()]
    for line in readme.splitlines():
        folder = Path()
        for name in re.findall(
            r"`([\w./-]+\.(?:py|md|toml|yaml|json)|(?:requant|kernels|recipes|eval|tests)[\w/.-]*/)`", line
        ):
            if "/" in name:
                folder = Path(name) if name.endswith("/") else Path(name).parent
            if not any(
                (base / name).exists() for base in (ROOT, ROOT / folder, ROOT / "requant", ROOT / "kernels")
            ):
                missing.append(name)
    made_by_a_run = {"recipe.yaml", "config.json", "README.md", "checksums.json"}
    assert sorted(set(missing) - made_by_a_run) == []


@pytest.mark.parametrize("name", available_recipes())
def test_recipes_load_and_are_named_by_the_rule(name: str) -> None:
    recipe = load_recipe(name)
    assert f"`{name}`" in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert name.endswith(f"-{recipe.quantizer.bits}bit")
    model = "bench" if "bench" in recipe.model else recipe.model
    usual = (
        ("paper", "lut")
        if model == "demo"
        else ("paper", "kmeans")
        if model == "bench"
        else ("best", "trellis")
    )
    own = (recipe.mode, recipe.method) == usual
    assert own == (name == f"{model}-{recipe.quantizer.bits}bit")
    assert own or recipe.method in name or recipe.mode in name
    assert name.startswith(model) and (model in ALIASES or model in ("demo", "bench"))


def test_shared_files_of_recipes_exist() -> None:
    for name in available_recipes():
        recipe = load_recipe(name)
        for path in (recipe.model, *recipe.calibration.text, *recipe.evaluation.text):
            if path.startswith(".."):
                assert (ROOT / path).exists(), path


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_its_test_file(method: str) -> None:
    assert (ROOT / "tests" / "requant" / "quantizers" / f"test_{method}.py").is_file()


def test_no_folders_or_hosts_of_a_machine() -> None:
    """Nothing in the project depends on, or speaks of, where it was made."""
    forbidden = re.compile(
        r"(?<![\w.~-])/(?:home|work|root|Users|mnt|data|scratch|opt)/\w|/tmp/\w|\blocalhost\b|\b(?:10|192\.168|172\.16)\.\d+\.\d+\b"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path in files(*TEXT)
        if path != Path(__file__) and "demo" not in path.parts  # a tokenizer's vocabulary
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []


def test_no_pickle() -> None:
    """safetensors, JSON and plain YAML only."""
    pattern = re.compile(r"\b(?:import pickle|torch\.load\(|yaml\.load\(|weights_only=False)")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in files(".py")
        if "tests" not in path.parts
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


OPTIONS = {
    "quantize": "as_json bits calibration device dry_run dtype eval_text head_bits method mode model num_samples output "
    "quiet recipe resume seed sensitivity seq_len size skip tune verbose",
    "sensitivity": "as_json bits calibration device dtype method model nodes num_samples output quiet recipe seed seq_len "
    "skip verbose",
    "eval": "against as_json context device dtype limit models quiet task_data tasks text windows",
    "inspect": "as_json checkpoint",
    "compare": "against as_json checkpoints context device dtype output quiet text windows",
    "export": "as_json checkpoint dtype output to",
    "generate": "checkpoint device dtype max_new_tokens prompt seed temperature",
    "bench": "against as_json batch checkpoint compile device dtype new_tokens prompt_tokens tune",
    "serve": "api_key checkpoint context device dtype host max_tokens_limit max_waiting name port quiet",
    "recipes": "as_json",
}


def test_the_options_are_these() -> None:
    """A frozen list: an option that goes or changes its name breaks somebody's script."""
    group = typer.main.get_command(app)
    found = {
        name: " ".join(sorted(p.name for p in command.params)) for name, command in group.commands.items()
    }  # type: ignore[attr-defined]
    for name, options in OPTIONS.items():
        assert set(options.split()) <= set(found[name].split()), name
    assert found == OPTIONS


def test_the_wheel_ships_what_is_read_at_run_time() -> None:
    """Templates, data and recipes lie inside the packages, or are put there by pyproject.toml."""
    import tomllib

    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["requant", "kernels/requant_kernels"]
    assert wheel["force-include"] == {"recipes": "requant/recipes"}


def test_git_ignores_no_source() -> None:
    """A pattern of .gitignore that hides a file of the package would break every clone."""
    names = [str(path.relative_to(ROOT)) for path in files(*TEXT, ".txt", ".safetensors")]
    answer = subprocess.run(
        ["git", "check-ignore", "--stdin"], input="\n".join(names), capture_output=True, text=True, cwd=ROOT
    )
    assert answer.stdout.split() == [] or answer.returncode == 128  # 128: not a clone
