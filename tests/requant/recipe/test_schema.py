import dataclasses
import random
import re
from pathlib import Path

import pytest
import yaml

from requant.errors import RecipeError, did_you_mean
from requant.quantizers.kmeans import KmeansConfig
from requant.quantizers.registry import METHODS
from requant.quantizers.rtn import RtnConfig
from requant.recipe.options import recipe_from_options
from requant.recipe.schema import (
    Budget,
    Calibration,
    Detach,
    Evaluation,
    Finetune,
    Recipe,
    Recovery,
    Sensitivity,
)
from requant.recipe.shipped import available_recipes
from requant.recipe.yaml_files import dump_recipe, from_dict, load_recipe, to_dict

EVERYTHING = Recipe(
    model="some/folder: with #signs",
    mode="dense",
    method="rtn",
    quantizer=RtnConfig(bits=5, group_size=-1, symmetric=True),
    calibration=Calibration(text=("a.txt", "b:c:d"), field="content", num_samples=7, seq_len=33),
    sensitivity=Sensitivity(score="marginal", nodes="plain32"),
    detach=Detach(
        outlier_fraction=1 / 3 / 100,
        outlier_rule="iqr",
        temperatures=(0.1, 3.0),
        significant_fraction=0.0,
        steps=5,
    ),
    finetune=Finetune(
        steps=3, tokens_per_step=100, lr=1e-5, warmup_steps=2, rounds=6, val_windows=3, eval_every=4
    ),
    evaluation=Evaluation(text=("e.txt",), field="f", context=64, windows=3),
    skip=("*.down_proj", "yes", "1"),
    modules={"*.o_proj": {"bits": 3}, "1": {"symmetric": False, "group_size": 32}},
    seed=-3,
)


def reload(text: str, tmp_path: Path) -> Recipe:
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    return load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize(
    "recipe", [EVERYTHING, Recipe(), *(Recipe(method=m, quantizer=METHODS[m].config()) for m in METHODS)]
)
def test_load_of_dump_is_the_recipe(recipe: Recipe, tmp_path: Path) -> None:
    assert reload(dump_recipe(recipe), tmp_path) == recipe
    assert from_dict(to_dict(recipe)) == recipe
    assert yaml.safe_load(dump_recipe(recipe)) == to_dict(recipe)  # plain data only


def test_whole_bits_of_a_budget_are_written_as_they_are_read() -> None:
    whole, read = (
        Recipe(budget=Budget(bits=bits, head_bits=2 * bits, embedding_bits=2 * bits)) for bits in (3, 3.0)
    )
    assert dump_recipe(whole) == dump_recipe(read) and "head_bits: 6.0" in dump_recipe(read)
    with pytest.raises(RecipeError, match=r"budget\.bits is 10{400}; it takes 1 to 8"):
        Budget(bits=10**400)


def test_random_recipes_round_trip(tmp_path: Path) -> None:
    pick = random.Random(0)
    for _ in range(50):
        recipe = dataclasses.replace(
            EVERYTHING,
            model=pick.choice(["null", "1e3", "~", "é", "true", "- x", "demo"]),
            method="kmeans",
            quantizer=KmeansConfig(bits=pick.randint(2, 8)),
            modules={"*": {"bits": pick.randint(2, 8)}},
            detach=Detach(
                outlier_fraction=pick.uniform(0, 0.2),
                temperatures=tuple(10 ** pick.uniform(-9, 9) for _ in range(3)),
            ),
            calibration=Calibration(text=tuple(pick.choices(["x.txt", "no", "3", ""], k=3))),
        )
        assert reload(dump_recipe(recipe), tmp_path) == recipe


def test_defaults_fill_what_is_not_said(tmp_path: Path) -> None:
    assert reload("{}", tmp_path) == Recipe()
    assert reload("method: gptq\nquantizer: {bits: 3}", tmp_path).quantizer == METHODS["gptq"].config(bits=3)
    assert reload("calibration: {text: one.txt}", tmp_path).calibration.text == ("one.txt",)
    assert reload("detach: {outlier_fraction: 0}", tmp_path).detach.outlier_fraction == 0.0


def test_scalars_are_read_as_they_are_meant(tmp_path: Path) -> None:
    """Where YAML 1.1 does not: it has 90 for the first text, 8, a date, and texts for numbers without a point."""
    read = reload(
        "{calibration: {text: [1:30, 010, 2026-11-28], num_samples: 1_000}, finetune: {lr: 1e-3, hidden_weight: 2.5E+0},\n"
        " deterministic: yes, detach: {temperatures: [.5, 1]}, seed: -0x10}",
        tmp_path,
    )
    assert read.calibration.text == ("1:30", "010", "2026-11-28") and read.calibration.num_samples == 1000
    assert (read.finetune.lr, read.finetune.hidden_weight, read.detach.temperatures) == (
        1e-3,
        2.5,
        (0.5, 1.0),
    )
    assert read.deterministic is True and read.seed == -16


@pytest.mark.parametrize(
    "name", ["1:30", "010", "1e3", "1E-3", "1_000", "2026-11-28", "yes", ".5", "0x1", "+1", "1.", "08"]
)
def test_names_that_look_like_numbers_round_trip(name: str, tmp_path: Path) -> None:
    recipe = Recipe(model=name, skip=(name,), modules={name: {"bits": 3}})
    assert reload(dump_recipe(recipe), tmp_path) == recipe
    assert yaml.safe_load(dump_recipe(recipe)) == to_dict(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bits: 3", r"r.yaml: unknown key 'bits'; known: budget, calibration, "),
        ("calibrations: {}", r"unknown key 'calibrations' \(did you mean 'calibration'\?\)"),
        (
            "calibration: {seqlen: 3}",
            r"r.yaml: calibration: unknown key 'seqlen' \(did you mean 'seq_len'\?\)",
        ),
        ("quantizer: {bit: 3}", r"r.yaml: quantizer: unknown key 'bit' \(did you mean 'bits'\?\)"),
        ("tuning: {steps: 3}", r"r.yaml: unknown key 'tuning': it is called 'finetune' now"),
        ("finetune: {rate: 0.1}", r"r.yaml: finetune: unknown key 'rate': it is called 'lr' now"),
        ("quantizer: {share: 0.1}", r"quantizer: unknown key 'share': it is called 'outlier_fraction' now"),
        ("quantizer: {bits: 9}", r"bits is 9, but codes have 2 to 8 bits"),
        ("quantizer: {bits: '3'}", r"r.yaml: quantizer: bits is '3'; it takes a whole number"),
        ("quantizer: {bits: 3.0}", r"bits is 3.0; it takes a whole number"),
        ("quantizer: {bits: true}", r"bits is True; it takes a whole number"),
        ("quantizer: 3", r"r.yaml: quantizer is 3; it takes keys with their values, like {key: value}"),
        (
            "method: kmean",
            rf"method 'kmean' is unknown \(did you mean 'kmeans'\?\); there are: {', '.join(METHODS)}, and",
        ),
        ("method: [rtn]", r"method is \['rtn'\], but takes a name: one of rtn, "),
        ("mode: papers", r"r.yaml: mode is 'papers' \(did you mean 'paper'\?\); it takes one of: "),
        ("sensitivity: {score: pqr}", r"score is 'pqr' \(did you mean 'pqi'\?\)"),
        ("sensitivity: {nodes: [1]}", r"nodes is '\[1\]'; it takes one of: gauss2"),
        ("sensitivity: pqi", r"sensitivity is 'pqi'; it takes keys with their values"),
        ("detach: {outlier_fraction: 0.45}", r"detach.outlier_fraction is 0.45; it takes 0 to 0.2"),
        ("detach: {outlier_fraction: .nan}", r"detach.outlier_fraction is nan"),
        ("detach: {significant_fraction: -1}", r"detach.significant_fraction is -1.0"),
        ("detach: {temperatures: []}", r"detach.temperatures is \[\]; it takes a list of positive numbers"),
        ("detach: {temperatures: [1, .nan]}", r"detach.temperatures is \[1.0, nan\]"),
        ("detach: {temperatures: {a: 1}}", r"temperatures is \{'a': 1\}; it takes a list"),
        ("detach: {temperatures: [a]}", r"temperatures is 'a'; it takes a number"),
        ("detach: {steps: 0}", r"detach.steps is 0; it takes 1 to 64"),
        ("calibration: {num_samples: 0}", r"calibration.num_samples is 0; it takes 1 to 1,000,000"),
        (
            f"calibration: {{num_samples: 1{'0' * 24}}}",
            r"calibration.num_samples is 10+; it takes 1 to 1,000,000",
        ),
        ("finetune: {steps: 1000000000000}", r"finetune.steps is 1000000000000; it takes 0 to 1,000,000"),
        ("finetune: {train_windows: 0}", r"finetune.train_windows is 0; it takes 1 to 1,000,000"),
        ("calibration: {seq_len: 4}", r"calibration.seq_len is 4; it takes 8 or more"),
        ("evaluation: {windows: 0}", r"evaluation.windows is 0"),
        ("evaluation: {windows: 1000001}", r"evaluation.windows is 1000001; it takes 1 to 1,000,000"),
        ("skip: [1]", r"skip is 1; it takes a text"),
        ("modules: [a]", r"r.yaml: modules must be a mapping of patterns to keys of quantizer"),
        ("modules: {1: {bits: 3}}", r"modules must be a mapping of patterns"),
        ("modules: {a: 3}", r"r.yaml: modules: 'a' is 3; it takes keys with their values"),
        ("modules: {a: {bit: 3}}", r"modules: 'a': unknown key 'bit' \(did you mean 'bits'\?\)"),
        ("modules: {a: {bits: '3'}}", r"modules: 'a': bits is '3'; it takes a whole number"),
        ("modules: {a: {bits: 9}}", r"modules: 'a': bits is 9, but codes have 2 to 8 bits"),
        ("method: trellis\nquantizer: {bits: x}", r"quantizer: bits is 'x'; it takes a number"),
        ("modules: {a: {bits: 16}}", r"to keep matrices at 16 bits, list their pattern under skip"),
        ("modules: {a: {outlier_fraction: 0.1}}", r"outlier_fraction has no meaning in mode paper"),
        (
            "{method: trellis, mode: dense, rotations: folded, modules: {a: {rotate_input: false}}}",
            r"rotations that are folded into the model decide rotate_input",
        ),
        ("{method: alps, mode: sparse, modules: {a: {bits: 8}}}", r"mode sparse stores all matrices alike"),
        (
            "{method: alps, mode: sparse, finetune: {blockwise: true}}",
            r"blockwise changes nothing in mode sparse",
        ),
        ("seed: x", r"seed is 'x'; it takes a whole number"),
        ("seed: 2147483648", r"seed is 2147483648; it takes a whole number of 32 bits"),
        ("{method: trellis, quantizer: {seed: -9999999999}}", r"seed is -9999999999; it takes"),
        ("finetune: {lr: .inf}", r"finetune.lr is inf; it takes a positive number"),
        ("finetune:", r"r.yaml: finetune is empty; it takes keys with their values"),
        (
            f"budget: {{bits: 2, first_round_weight: {'9' * 400}}}",
            r"first_round_weight is out of every range",
        ),
        ("finetune: {rounds: -1}", r"finetune.rounds is -1; it takes 0 or more"),
        ("recovery: {decay: .inf}", r"recovery.decay is inf"),
        ("- 1", r"r.yaml holds no mapping of keys to values"),
        ("", r"r.yaml holds no mapping"),
        ("a: [", r"is not valid YAML"),
        ("seed: 2026-99-99", r"seed is '2026-99-99'; it takes a whole number"),
        ("seed: 1:30", r"seed is '1:30'; it takes a whole number"),
        ("seed: 010", r"seed is '010'; it takes a whole number"),
        ("finetune: {lr: 1:30.5}", r"lr is '1:30.5'; it takes a number"),
        ("calibration: {num_samples: 1e3}", r"num_samples is 1000.0; it takes a whole number"),
        ("seed: yes", r"seed is True; it takes a whole number"),
        ("model: off", r"model is False; it takes a text"),
        ("!!python/object/apply:os.system ['true']", r"is not valid YAML"),
        ("[" * 5000, r"is not valid YAML"),
        ("1: 2", r"unknown key '1'"),
    ],
)
def test_a_wrong_recipe_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        reload(text, tmp_path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="is not valid YAML"):
        load_recipe(str(tmp_path / "r.yaml"))


def test_a_config_of_another_method_is_refused() -> None:
    with pytest.raises(RecipeError, match="method 'gptq' takes a GptqConfig, not KmeansConfig"):
        Recipe(method="gptq")


def test_inputs_that_a_method_does_not_read_are_refused() -> None:
    recipe = {"method": "rtn", "calibration": {"inputs": "corrected"}}
    with pytest.raises(
        RecipeError, match="reads no Hessian of its inputs; leave it out, or choose one of: lut, gptq"
    ):
        from_dict(recipe)
    assert from_dict(recipe | {"method": "gptq"}).calibration.inputs == "corrected"
    best = recipe | {"method": "trellis", "mode": "best"}
    assert from_dict(best).calibration.inputs == "corrected"
    with pytest.raises(RecipeError, match="changes nothing for mode best with fine-tuning"):
        from_dict(best | {"finetune": {"steps": 5}})


def test_recovery_is_of_pruned_models() -> None:
    recovery = {"recovery": {"method": "ast"}}
    for mode, method in (("best", "trellis"), ("paper", "kmeans"), ("dense", "rtn")):
        with pytest.raises(
            RecipeError, match=f"recovery changes nothing in mode {mode}, which prunes nothing; leave"
        ):
            from_dict(recovery | {"mode": mode, "method": method})
    sparse = from_dict(recovery | {"mode": "sparse", "method": "alps"})
    assert sparse.recovery.method == "ast"
    assert recipe_from_options(sparse, mode="dense", method="rtn", code_bits=4).recovery == Recovery()


PRUNING, OTHERS = "magnitude, wanda, sparsegpt, alps", "rtn, hqq, kmeans, lut, gptq, awq, trellis"


@pytest.mark.parametrize(
    ("mode", "given", "sentence"),
    [
        ("sparse", {"mode": "dense"}, "has mode sparse, and method alps does not go with mode dense; run `requant "
         f"sparsify`, or choose --method too, from {OTHERS}."),
        ("sparse", {"mode": "best", "method": "wanda"}, "has mode sparse, and method wanda does not go with mode best; run "
         f"`requant sparsify`, or choose --method too, from {OTHERS}."),
        ("sparse", {"method": "rtn"}, "has mode sparse, which does not go with method rtn; choose --method from "
         f"{PRUNING}, or give --mode best, paper or dense too."),
        ("dense", {"mode": "sparse"}, "has mode dense, and method rtn does not go with mode sparse; leave --mode out, or "
         f"choose --method too, from {PRUNING}."),
        ("dense", {"method": "alps"}, "has mode dense, which does not go with method alps; choose --method from "
         f"{OTHERS}, or give --mode sparse too."),
    ],
)  # fmt: skip
def test_modes_and_methods_beside_a_recipe(tmp_path: Path, mode: str, given: dict, sentence: str) -> None:
    recipe = from_dict({"mode": mode, "method": "alps" if mode == "sparse" else "rtn"})
    file = tmp_path / "own.yaml"
    file.write_text(dump_recipe(recipe))
    for each, name in ((recipe, "the recipe"), (str(file), f"recipe {file}")):
        with pytest.raises(RecipeError, match=f"^{re.escape(f'{name} {sentence}')}$"):
            recipe_from_options(each, **given)
    assert recipe_from_options(recipe, mode="sparse", method="wanda").method == "wanda"
    with pytest.raises(RecipeError, match=r"mode is 'spars' \(did you mean 'sparse'\?\)"):
        recipe_from_options(recipe, mode="spars")


def test_names(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"'demo-3bits' is neither a file nor a recipe \(did you mean 'demo-3bit'\?\)"
    ):
        load_recipe("demo-3bits")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "recipe.yaml").write_text(dump_recipe(Recipe()))
    with pytest.raises(RecipeError, match=r"is a folder, .*; give the recipe in it, .*out/recipe\.yaml\.$"):
        load_recipe(tmp_path / "out")
    assert load_recipe("demo-3bit") == load_recipe(str(available_recipes()["demo-3bit"]))
    assert did_you_mean("x", ["quantizer"]) == ""
