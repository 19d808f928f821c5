"""What holds for the repository as a whole."""

import ast
import gc
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

from requant.cli import app
from requant.models.aliases import ALIASES
from requant.recipe.defaults import default_recipe
from requant.recipe.options import budget_name
from requant.recipe.shipped import available_recipes
from requant.recipe.yaml_files import load_recipe

ROOT = Path(__file__).parents[1]
FOLDERS = ("requant", "kernels", "tests", "eval", "recipes", "docs")
TEXT = {".py", ".md", ".yaml", ".toml", ".html", ".yml", ".json", ".cfg"}


def files(*suffixes: str) -> list[Path]:
    """Files of the project, whether committed yet or not."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    found += [path for path in ROOT.iterdir() if path.is_file()]
    return sorted(p for p in found if p.suffix in suffixes and "__pycache__" not in p.parts)


LAYERS = (  # a module may import from its own folder and from those after it
    "cli",
    "server",
    "integrations",
    "exporters",
    "report",
    "pipeline",
    "evaluation",
    "inference",
    "finetune",
    "allocation",
    "run",
    "recipe",
    "quantizers",
    "sensitivity",
    "calibration",
    "checkpoint",
    "models",
    "formats",
    "sparse_training",
    "sparsity",
    "text",
)
BELOW_ALL = (
    "kernel_choice",
    "files",
    "progress",
    "display",
    "ranks",
    "processes",
    "errors",
    "extras",
    "version",
)


def modules(folder: str) -> list[Path]:
    return [path for path in files(".py") if path.is_relative_to(ROOT / folder)]


@cache
def parsed(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    gc.freeze()  # trees stay until the end: the garbage collector need not look through all of them again and again
    return tree


@pytest.mark.parametrize("path", modules("requant") + modules("kernels") + modules("eval"), ids=str)
def test_modules_say_what_they_are(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
    assert docstring, "no module docstring"
    if path.name == "__init__.py":
        assert len(docstring.split("\n\n")[0].splitlines()) <= 3, "say in three lines what lives here"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All of them, and none of the expressions within, which are nearly all nodes of a tree."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


def requant_imports(tree: ast.AST) -> list[str]:
    """Modules of requant that the statements of `tree` import, as dotted names."""
    found: list[str] = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if name.split(".")[0] == "requant"]


def test_every_folder_has_its_layer() -> None:
    folders = {path.parent.name for path in (ROOT / "requant").glob("*/__init__.py")}
    assert folders == set(LAYERS)
    assert {path.stem for path in (ROOT / "requant").glob("*.py")} == {"__init__", "__main__", *BELOW_ALL}


def test_imports_run_downward() -> None:
    """Functions included; `requant/__init__.py`, which only names what is public, may import from everywhere, as
    may `__main__.py`."""
    ranks = {name: rank for rank, name in enumerate((*LAYERS, *BELOW_ALL))}
    upward = []
    for path in modules("requant"):
        importer = path.relative_to(ROOT / "requant").parts[0].removesuffix(".py")
        if importer in ("__init__", "__main__"):
            continue
        for name in requant_imports(parsed(path)):
            imported = name.split(".")[1] if "." in name else ""
            # `import requant` and its version are for everyone; every other name of it would be an import upward
            if imported in ("", "__version__"):
                continue
            if ranks.get(imported, -1) < ranks[importer]:
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upward == []


def test_readme_names_the_folders_in_this_order() -> None:
    rows = [
        line
        for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| `requant/")
    ]
    assert tuple(re.findall(r"`(?:requant/)?(\w+)/`", " ".join(row.split("|")[1] for row in rows))) == LAYERS


def defined_names(path: Path) -> set[str]:
    """What a module defines itself, at any depth."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_names_are_imported_from_where_they_are_defined() -> None:
    """Else moving an import in one module breaks another. Packages may pass names on."""
    defined = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): defined_names(path)
        for path in modules("requant")
        if path.name != "__init__.py"
    }
    passed_on = []
    for path in [*modules("requant"), *modules("eval"), *modules("tests")]:
        for node in statements(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module in defined:
                names = {alias.name for alias in node.names} - defined[node.module]
                passed_on += [f"{path.relative_to(ROOT)}: {name} of {node.module}" for name in sorted(names)]
    assert passed_on == []


def test_imports_run_downward_within_the_pipeline() -> None:
    """What runs imports `planning/`, which imports `preparation/`."""
    order = ("pipeline", "planning", "preparation")
    upward, found = [], set()
    for path in modules("requant/pipeline"):
        importer = path.parent.name
        for name in requant_imports(parsed(path)):
            if not name.startswith("requant.pipeline."):
                continue
            imported = name.split(".")[2] if name.split(".")[2] in order else "pipeline"
            found.add((importer, imported))
            if order.index(imported) < order.index(importer):
                upward.append(f"{path.relative_to(ROOT)} imports {name}")
    assert upward == [] and {("pipeline", "planning"), ("planning", "preparation")} <= found


def test_kernels_lie_below_requant() -> None:
    """They and their benchmarks can be used without the rest; `eval/` measures both together."""
    imports = {path: requant_imports(parsed(path)) for path in modules("kernels")}
    assert {path: names for path, names in imports.items() if names} == {}


@pytest.mark.parametrize("path", modules("kernels"), ids=str)
def test_kernels_stay_readable(path: Path) -> None:
    """At most 25 parameters and 120 lines a function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef):
            given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            assert len(given) <= 25, f"{node.name} has {len(given)} parameters"
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= 120, f"{node.name} has {lines} lines"


def test_readme_is_short_and_names_files_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    links = {link for link in re.findall(r"\]\(([^)#]+)", readme) if "://" not in link}
    missing = {link for link in links if not (ROOT / link).exists()}
    for line in readme.splitlines():  # `a/b/`, `c/` in one line: c is beside b
        folder = ROOT
        for name in re.findall(r"`([\w./-]+(?:/|\.(?:py|md|toml|yaml)))`", line):
            path = ROOT / name if (ROOT / name).exists() else folder / name
            if not path.exists():
                missing.add(name)
            folder = path.parent
    assert missing == set()


@pytest.mark.parametrize("name", available_recipes())
def test_recipes_load_and_are_named_by_the_rule(name: str) -> None:
    recipe = load_recipe(name)
    assert f"`{name}`" in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    assert recipe.model == "demo" or recipe.model in ALIASES
    usual = default_recipe(recipe.model, None, gpu=recipe.model != "demo")
    between = "" if (recipe.mode, recipe.method) == (usual.mode, usual.method) else f"{recipe.method}-"
    assert name == f"{recipe.model}-{between}{budget_name(recipe)}"


@pytest.mark.parametrize("name", available_recipes())
def test_recipes_of_the_package_read_no_folder(name: str) -> None:
    """The wheel has them too, where nothing lies beside the repository."""
    recipe = load_recipe(name)
    paths = (recipe.model, *recipe.calibration.text, *recipe.evaluation.text)
    assert [path for path in paths if path.startswith((".", "/", "~"))] == []


@pytest.mark.parametrize(
    "file", sorted((ROOT / "eval" / "recipes").glob("*.yaml")), ids=lambda file: file.stem
)
def test_recipes_of_the_studies_load_and_read_shared_files(file: Path, shared: Callable[[str], Path]) -> None:
    recipe = load_recipe(str(file))
    assert file.stem.endswith(f"-{budget_name(recipe)}")
    for path in (recipe.model, *recipe.calibration.text, *recipe.evaluation.text):
        assert shared(path.removeprefix("../shared/")).exists()


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
    "quantize": "all_experts as_json bits calibration code_bits deterministic device dry_run dtype eval_text finetune_steps "
    "gpus group_size head_bits log_file method mode model modules num_samples output own_windows push_to quiet "
    "recipe resume rotations save_every seed sensitivity seq_len size skip symmetric target verbose",
    "sweep": "all_experts as_json bits calibration deterministic device dtype eval_text finetune_steps group_size head_bits "
    "log_file method mode model modules num_samples output own_windows quiet recipe resume rotations save_every seed "
    "sensitivity seq_len skip symmetric verbose",
    "sparsify": "all_experts as_json bits calibration deterministic device dry_run dtype eval_text finetune_steps log_file "
    "method model num_samples output pattern quiet recipe recover resume save_every seed seq_len skip verbose "
    "verify",
    "sensitivity": "all_experts as_json bits calibration code_bits deterministic device dtype group_size method model "
    "modules nodes num_samples output quiet recipe seed seq_len skip symmetric verbose",
    "eval": "as_json context device dtype limit models quiet reference task_data tasks text windows",
    "inspect": "as_json checkpoint",
    "compare": "as_json checkpoints context device dtype output quiet reference text windows",
    "export": "as_json checkpoint dtype output to",
    "generate": "chat checkpoint device dtype max_new_tokens prompt seed temperature",
    "bench": "as_json autotune batch checkpoint compile device dtype new_tokens prompt_tokens reference",
    "serve": "api_key batch checkpoint context device dtype host max_tokens_limit max_waiting name port quiet",
    "recipes": "as_json keys",
    "methods": "as_json",
    "doctor": "as_json device quiet",
}


def test_no_option_is_lost() -> None:
    """An option that goes or changes its name breaks somebody's script; a new one need not be listed here."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    found = {(name, p.name) for name, command in group.commands.items() for p in command.params}
    assert {
        (name, option) for name, options in OPTIONS.items() for option in options.split()
    } - found == set()


def test_git_ignores_no_source() -> None:
    """A pattern of .gitignore that hides a file of the package would break every clone."""
    names = [str(path.relative_to(ROOT)) for path in files(*TEXT, ".txt", ".safetensors")]
    answer = subprocess.run(
        ["git", "check-ignore", "--stdin"], input="\n".join(names), capture_output=True, text=True, cwd=ROOT
    )
    assert answer.stdout.split() == [] or answer.returncode == 128  # 128: not a clone
