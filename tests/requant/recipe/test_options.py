from pathlib import Path
from typing import Any

import pytest

from requant.errors import RecipeError
from requant.quantizers.registry import METHODS
from requant.recipe.options import output_folder, recipe_from_options
from requant.recipe.schema import Budget, Calibration, Detach, Evaluation, Recipe
from requant.recipe.sizes import parse_bits, parse_size
from requant.recipe.yaml_files import dump_recipe, from_dict, load_recipe, to_dict

options = recipe_from_options


def test_bits_alone() -> None:
    recipe = options(bits="3")
    assert (recipe.model, recipe.method, recipe.mode) == ("demo", "trellis", "best")
    assert recipe.budget == Budget(bits=3.0)
    assert recipe.calibration == Calibration(num_samples=16, seq_len=512)
    other = options(bits="3", model="llama-3.2-1b")
    assert other.calibration == Calibration() and other.evaluation == Evaluation()


def test_neither_bits_nor_recipe() -> None:
    with pytest.raises(RecipeError, match="say how many bits: --bits 1 to 8, or --size, or name a --recipe"):
        options(model="demo")


def test_every_option_reaches_the_recipe() -> None:
    recipe = options(
        code_bits="2", method="gptq", mode="dense", sensitivity="marginal", calibration=["a.txt", "b.txt"],
        eval_text=["c.txt"], num_samples=3, seq_len=65, skip=["down_proj"], seed=9, nodes="gauss4", model="x/y",
    )  # fmt: skip
    assert recipe == Recipe(
        model="x/y",
        mode="dense",
        method="gptq",
        quantizer=METHODS["gptq"].config(bits=2),
        calibration=Calibration(text=("a.txt", "b.txt"), num_samples=3, seq_len=65),
        sensitivity=recipe.sensitivity,
        detach=Detach(),
        evaluation=Evaluation(text=("c.txt",), context=65),
        skip=("down_proj",),
        seed=9,
    )
    assert (recipe.sensitivity.score, recipe.sensitivity.nodes) == ("marginal", "gauss4")


def test_windows_that_the_model_writes_without_training_are_refused(caplog) -> None:
    with pytest.raises(RecipeError, match=r"--own-windows 64 are to train on, and .* give --finetune-steps."):
        recipe_from_options(bits=3, model="demo", own_windows=64)
    assert recipe_from_options(bits=3, model="demo", own_windows=64, finetune_steps=10).finetune.trains
    assert recipe_from_options(bits=3, model="demo", own_windows=64, gpu=True).finetune.trains
    assert not caplog.text
    with pytest.raises(RecipeError, match=r"finetune.own_windows is -1; it takes 0 to 1,000,000"):
        recipe_from_options(bits=3, own_windows=-1)


@pytest.fixture
def file(tmp_path: Path) -> str:
    recipe = Recipe(
        model="some/model",
        method="gptq",
        quantizer=METHODS["gptq"].config(bits=3, damp=0.05),
        calibration=Calibration(text=("own.txt",), num_samples=5),
        skip=("o_proj",),
        seed=4,
    )
    (tmp_path / "own.yaml").write_text(dump_recipe(recipe))
    return str(tmp_path / "own.yaml")


def test_a_recipe_alone_is_taken_as_it_is(file: str) -> None:
    assert options(recipe=file) == load_recipe(file)


def test_options_override_a_recipe_and_leave_the_rest(file: str) -> None:
    recipe = options(recipe=file, code_bits="4", num_samples=9)
    assert recipe.quantizer == METHODS["gptq"].config(bits=4, damp=0.05)
    assert recipe.calibration == Calibration(text=("own.txt",), num_samples=9)
    assert (recipe.model, recipe.skip, recipe.seed) == ("some/model", ("o_proj",), 4)
    assert options(recipe=file, model="demo").model == "demo"  # said, not defaulted
    assert options(recipe=file, seed=0).seed == 0


def test_the_base_may_be_a_name_a_file_plain_data_or_a_recipe(file: str) -> None:
    loaded = load_recipe(file)
    for base in (file, Path(file), loaded, to_dict(loaded)):
        assert options(base) == loaded
        assert options(base, code_bits=2, model="demo").quantizer == METHODS["gptq"].config(bits=2, damp=0.05)
    assert options({"method": "rtn", "quantizer": {"bits": 3}}).quantizer.bits == 3
    with pytest.raises(
        RecipeError, match=r"'bits' is an option and no key of a recipe; give it as bits=\.\.\."
    ):
        options({"bits": 3})


def test_options_of_the_grid() -> None:
    recipe = options(bits=4, method="gptq", group_size=32, symmetric=True)
    assert recipe.quantizer == METHODS["gptq"].config(bits=4, group_size=32, symmetric=True)
    grids = ", ".join(name for name, method in METHODS.items() if hasattr(method.config, "group_size"))
    with pytest.raises(RecipeError, match=rf"--group-size has no meaning for method 'lut'.*{grids}"):
        options(bits=3, method="lut", group_size=32)
    with pytest.raises(RecipeError, match="--symmetric has no meaning for method 'hqq'"):
        options(bits=3, method="hqq", symmetric=True)
    with pytest.raises(RecipeError, match=r"group_size is '32'; it takes a whole number"):
        options(bits=3, method="gptq", group_size="32")


def test_the_trellis_code_follows_from_the_bits_unless_it_is_given(file: str) -> None:
    assert [options(bits=bits).quantizer.code for bits in (1.5, 2, 2.25, 4)] == [
        "pair",
        "pair",
        "mul1",
        "mul1",
    ]
    assert options(code_bits=2).quantizer.code == "pair" and options(size="600MB").quantizer.code == "mul1"
    assert options(bits=2, code="mul1").quantizer.code == "mul1"
    named = load_recipe("demo-3bit")
    assert (
        options(recipe="demo-3bit", bits=2).quantizer.code == named.quantizer.code == "mul1"
    )  # what it says stays
    with pytest.raises(RecipeError, match="--code has no meaning for method 'gptq'"):
        options(bits=2, method="gptq", code="pair")
    with pytest.raises(RecipeError, match="trellis codes are mul1, 3inst, pair"):
        options(bits=2, code="hyb")


def test_an_unknown_option_gets_a_hint() -> None:
    with pytest.raises(RecipeError, match=r"there is no option 'grop_size' \(did you mean 'group_size'\?\)"):
        options(bits=3, grop_size=32)


def test_numbers_of_python_and_text_of_the_command_are_the_same() -> None:
    assert options(bits=2.5) == options(bits="2.5") and options(bits=3) == options(bits="3")
    assert options(size=600_000_000) == options(size="600MB")
    assert options(bits=3, calibration=Path("a.txt")) == options(bits=3, calibration=["a.txt"])


def test_another_method_keeps_the_bits_and_drops_settings_it_does_not_have(file: str) -> None:
    recipe = options(recipe=file, method="kmeans")
    assert recipe.quantizer == METHODS["kmeans"].config(bits=3)
    assert options(recipe=file, method="gptq").quantizer.damp == 0.05


@pytest.mark.parametrize("recipe", [None, "demo-3bit"])
def test_typing_errors_get_a_hint(recipe: str | None) -> None:
    with pytest.raises(RecipeError, match=r"method 'kmaens' is unknown \(did you mean 'kmeans'\?\)"):
        options(bits="3", method="kmaens", recipe=recipe)
    with pytest.raises(RecipeError, match=r"mode is 'papr' \(did you mean 'paper'\?\)"):
        options(bits="3", mode="papr", recipe=recipe)
    with pytest.raises(RecipeError, match=r"score is 'hesian' \(did you mean 'hessian'\?\)"):
        options(bits="3", sensitivity="hesian", recipe=recipe)


@pytest.mark.parametrize(
    ("bits", "value"), [("2", 2), ("8", 8), ("4.0", 4), ("03", 3), ("2.25", 2.25), ("1", 1)]
)
def test_bits(bits: str, value: float) -> None:
    assert parse_bits(bits) == value


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ("9", "is out of range; give 1 to 8, like 3 or 2.25"),
        ("0.5", "is out of range"),
        ("-3", "is out of range"),
        ("0", "is out of range"),
        ("nan", "is out of range"),
        ("inf", "is out of range"),
        ("three", "is not a number; give 1 to 8"),
        ("", "is not a number"),
        (True, "is not a number"),
    ],
)
def test_other_bits_are_refused(bits: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=f"--bits {bits} {message}"):
        parse_bits(bits)


@pytest.mark.usefixtures("unchecked_types")
def test_bytes_are_no_bits() -> None:
    bits: Any = b"3"
    with pytest.raises(RecipeError, match="is not a number"):
        parse_bits(bits)


@pytest.mark.parametrize(
    ("size", "value"),
    [
        ("600MB", 600_000_000),
        ("1.5gb", 1_500_000_000),
        ("1.5 GiB", 3 * 2**29),
        ("2KiB", 2048),
        ("7", 7),
        ("12 B", 12),
    ],
)
def test_sizes(size: str, value: int) -> None:
    assert parse_size(size) == value


@pytest.mark.parametrize(
    "size",
    ["10XB", "MB", "", "-5MB", "1e9", "6,5MB", "0MB", "0.1B", "600 M B", "٣MB", 400 * "9", f"{308 * '9'}GB"],
)
def test_other_sizes_are_refused(size: str) -> None:
    with pytest.raises(RecipeError, match=f"--size {size} is (not a size|nothing)"):
        parse_size(size)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("mode", [None, "best", "paper", "dense"])
@pytest.mark.parametrize("method", [None, "rtn", "kmeans", "trellis"])
def test_bits_are_a_budget_everywhere_and_code_bits_are_those_of_a_code(gpu, mode, method) -> None:
    where = {"gpu": gpu, "mode": mode, "method": method}
    for bits in ("2", "3", "2.25"):
        assert options(bits=bits, **where).budget == Budget(bits=float(bits))
    codes = options(code_bits="3", **where)
    assert (codes.quantizer.bits, codes.budget) == (3, Budget())
    assert options(size="600MB", **where).budget == Budget(size=600_000_000)
    given = options(bits="3", head_bits=6, **where).budget
    assert given == Budget(bits=3.0, head_bits=6, embedding_bits=6)


def test_code_bits_are_those_that_the_method_takes() -> None:
    assert options(code_bits="2.25", method="trellis").quantizer.bits == 2.25
    with pytest.raises(RecipeError, match=r"bits is 2.25; it takes a whole number"):
        options(code_bits="2.25", method="rtn")
    with pytest.raises(RecipeError, match=r"--code-bits 9 is out of range"):
        options(code_bits="9")


def test_every_device_has_the_same_kind_of_codes_and_a_gpu_trains() -> None:
    cpu, gpu = options(bits="2"), options(bits="2", gpu=True)
    assert (cpu.mode, cpu.method) == (gpu.mode, gpu.method) == ("best", "trellis")
    assert cpu.finetune.steps == 0
    assert gpu.finetune.steps is None, "as many as the model's size allows"
    assert options(bits="3", method="lut").mode == "best"
    assert options(bits="3", mode="dense").method == options(bits="3", mode="paper").method == "lut"


def test_budgets_replace_one_another(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(dump_recipe(Recipe(budget=Budget(bits=2.5, head_bits=8, predictor="pqi"))))
    assert load_recipe(str(file)).budget == Budget(bits=2.5, head_bits=8, predictor="pqi")
    assert options(recipe=str(file)).budget.bits == 2.5
    assert options(recipe=str(file), bits="3").budget == Budget(bits=3.0, head_bits=8, predictor="pqi")
    assert options(recipe=str(file), code_bits="3").budget == Budget(head_bits=8, predictor="pqi")
    assert options(recipe=str(file), method="rtn").budget.bits == 2.5
    assert options(recipe=str(file), size="9KB").budget == Budget(size=9000, head_bits=8, predictor="pqi")
    for two in (
        {"bits": "3", "size": "9KB"},
        {"bits": "3", "code_bits": "3"},
        {"code_bits": "3", "size": "9KB"},
    ):
        with pytest.raises(RecipeError, match="--bits, --code-bits and --size exclude one another; give one"):
            options(**two)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_bits": 9}, "head_bits is 9.*16, or 2 to 8 in quarters"),
        ({"head_bits": 4.1}, "head_bits is 4.1"),
        ({"bits": 0.5}, "budget.bits is 0.5; it takes 1 to 8"),
        ({"bits": 3.0, "size": 5}, "budget.size is 5; it takes no value together with budget.bits"),
        ({"size": 0}, "budget.size is 0"),
        ({"predictor": "curve"}, "predictor is 'curve' .did you mean 'curvature'"),
    ],
)
def test_other_budgets_are_refused(values: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        from_dict({"budget": values})


@pytest.mark.parametrize(
    ("budget", "name"),
    [
        (Budget(), "4bit-codes"),
        (Budget(bits=2.25), "2.25bit"),
        (Budget(size=600_000_000), "600MB"),
        (Budget(size=1_500), "1.5KB"),
    ],
)
def test_the_output_is_named_by_what_was_asked(budget: Budget, name: str) -> None:
    assert output_folder(Recipe(model="demo", budget=budget)) == Path(f"demo-kmeans-{name}")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("/a/b/Model-1B/", "Model-1B"),
        ("owner/name", "name"),
        ("llama-3.2-1b", "llama-3.2-1b"),
        ("..", ".."),
    ],
)
def test_output_folder(model: str, name: str) -> None:
    if name == "..":
        name = Path.cwd().parent.name
    assert output_folder(Recipe(model=model)) == Path(f"{name}-kmeans-4bit-codes")


@pytest.mark.parametrize(("program", "group"), [("vllm", 128), ("transformers", 128), ("llama.cpp", 32)])
def test_a_program_picks_its_grids(program: str, group: int) -> None:
    recipe = options(code_bits=4, target=program)
    assert (recipe.mode, recipe.method, recipe.quantizer.symmetric) == ("dense", "gptq", True)
    assert recipe.quantizer.group_size == group and recipe.quantizer.bits == 4
    own = options(code_bits=4, target=program, method="rtn", group_size=64, symmetric=False)
    assert own.quantizer == METHODS["rtn"].config(bits=4, group_size=64)
    assert options(code_bits=4, target=program, method="hqq").quantizer == METHODS["hqq"].config(
        bits=4, group_size=group
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"target": "vlm"}, r"--for vlm is unknown \(did you mean 'vllm'\?\)"),
        ({"target": "vllm", "mode": "paper"}, "takes mode dense, not 'paper'"),
        ({"target": "vllm", "method": "awq"}, "uniform grids, not 'awq'; choose one of: gptq, hqq, rtn"),
        ({"target": "vllm", "method": "trellis"}, "uniform grids, not 'trellis'; choose one of: gptq"),
        ({"target": "llama.cpp", "method": "gptk"}, r"method 'gptk' is unknown \(did you mean 'gptq'\?\)"),
        ({"target": "vllm", "bits": 4}, "takes --code-bits, the same for all matrices"),
    ],
)
def test_what_a_program_cannot_read_is_refused(given: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        options(**({} if "bits" in given else {"code_bits": 4}), **given)
