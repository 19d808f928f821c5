"""`requant sparsify` as a user runs it: checkpoint, verdict, resumption, and the same recipe again."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

import requant
from requant.checkpoint.read import load_weights
from requant.pipeline import sparse as mode
from requant.pipeline.sparse_verdict import PlainCodes, SparseVerdict
from requant.recipe.yaml_files import load_recipe


@pytest.fixture
def sparsify(cli, tiny_folder, tiny_text_file: Path, tmp_path: Path):
    """`sparsify("out", ...)`: exit code, stdout and stderr of a run on a tiny model."""
    texts = ("--calibration", tiny_text_file, "--num-samples", 8, "--seq-len", 32)

    def run(output: str, *options: object) -> tuple[int, str, str]:
        model = () if "--recipe" in options else ("--model", tiny_folder("llama"), *texts)
        return cli("sparsify", *model, "--device", "cpu", "-q", "--output", tmp_path / output, *options)

    return run


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_a_checkpoint_of_2_4_matrices_and_a_verdict(cli, sparsify, tmp_path: Path) -> None:
    code, out, error = sparsify("out", "--bits", 4)
    assert code == 0, error
    assert "Memory and single streams: take " in out and "Prefill and large batches: take " in out
    model = requant.load(tmp_path / "out").eval()
    tokens = torch.arange(20)[None]
    for name, weight in load_weights(tmp_path / "out"):
        assert weight.dense.bits == 4
        kept = (weight.dequantize().view(weight.shape[0], -1, 4) != 0).sum(2)
        assert (kept == 2).all(), name
    code, out, _ = cli("inspect", tmp_path / "out")
    assert code == 0 and "metadata" in out and "semi_structured" in out
    assert cli("export", tmp_path / "out", "--to", "dense", "--output", tmp_path / "dense")[0] == 0
    from transformers import AutoModelForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").eval()
    torch.testing.assert_close(dense(tokens).logits, model(tokens).logits)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"]["value_bits"] == 4 and report["sizes"]["metadata"] > 0
    assert "2:4 or plain codes?" in (tmp_path / "out" / "report.html").read_text()


def test_the_recipe_of_a_run_gives_the_same_bytes(cli, sparsify, tmp_path: Path) -> None:
    assert sparsify("one", "--method", "wanda")[0] == 0
    recipe = tmp_path / "one" / "recipe.yaml"
    assert load_recipe(str(recipe)).mode == "sparse"
    code, _, error = sparsify("two", "--recipe", recipe)
    assert code == 0, error
    assert sha256(tmp_path / "one") == sha256(tmp_path / "two")
    assert cli("quantize", "--recipe", recipe, "-q", "--output", tmp_path / "three")[0] == 0
    assert sha256(tmp_path / "one") == sha256(tmp_path / "three")


@pytest.mark.slow
def test_a_run_that_stopped_resumes_with_the_same_bytes(sparsify, tmp_path: Path, monkeypatch) -> None:
    training = ("--recover", "ast", "--finetune-steps", 12, "--method", "magnitude")
    assert sparsify("one", *training)[0] == 0

    class Stopped(Exception):
        """In the middle of the run."""

    def stop(*_: object, **__: object) -> None:
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(mode, "recover", stop)  # matrices are pruned, training has not begun
        with pytest.raises(Stopped):
            sparsify("two", *training)
    code, _, error = sparsify("two", *training, "--resume")
    assert code == 0, error
    assert sha256(tmp_path / "one") == sha256(tmp_path / "two")
    with monkeypatch.context() as patch:  # stops behind training, whose result must be found again
        patch.setattr("requant.pipeline.quantize.diagnose", stop)
        with pytest.raises(Stopped):
            sparsify("three", *training)
    with monkeypatch.context() as patch:
        patch.setattr(mode, "recover", stop)
        assert sparsify("three", *training, "--resume")[0] == 0
    assert sha256(tmp_path / "one") == sha256(tmp_path / "three")
    reports = [json.loads((tmp_path / n / "report.json").read_text()) for n in ("one", "two", "three")]
    assert reports[0]["flip_rates"] == reports[1]["flip_rates"] == reports[2]["flip_rates"]
    assert len(reports[0]["flip_rates"]) == 2 and max(reports[0]["flip_rates"]) > 0


@pytest.mark.slow
def test_verify_measures_the_codes(sparsify) -> None:
    code, out, error = sparsify("out", "--method", "magnitude", "--bits", 2, "--verify", "--json")
    assert code == 0, error
    found = json.loads(out)["verdict"]
    assert found["codes"]["kl"] > 0 and found["codes"]["bytes"] <= found["bytes"]


def test_the_plan(sparsify) -> None:
    code, out, _ = sparsify("out", "--dry-run", "--json")
    assert code == 0 and json.loads(out)["bits_per_weight"] == pytest.approx(8.75, abs=0.4)
    assert Path(json.loads(out)["output"]).name == "out"


def test_the_plan_counts_what_the_pruned_model_is_compared_with(sparsify) -> None:
    plans = {}
    for verify in ((), ("--verify",)):
        code, out, error = sparsify("out", "--bits", 2, *verify, "--dry-run", "--json")
        assert code == 0, error
        plans[bool(verify)] = json.loads(out)
    assert plans[True]["seconds"] > plans[False]["seconds"]
    assert plans[True]["peak_memory"] >= plans[False]["peak_memory"]
    assert plans[False]["comparison"].endswith("bits per weight, predicted")
    assert "measured: about" in plans[True]["comparison"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--pattern", "4:8"), "--pattern 4:8 is not supported: GPUs multiply 2:4 matrices only"),
        (("--method", "gptq"), "method 'gptq' makes no 2:4 matrices: choose one of magnitude, wanda"),
        (("--recover", "all"), "method is 'all'; it takes one of: fixed, ast, s-ste"),
        (("--bits", 12), "bits is 12, but the values of a 2:4 matrix take 2 to 8 bits, or 16"),
        (("--recipe", "demo-3bit"), "recipe demo-3bit has mode best, not sparse: run `requant quantize`"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(sparsify, options, sentence: str) -> None:
    code, _, error = sparsify("out", *options)
    assert code == 2 and sentence in error and "Traceback" not in error


def test_quantize_points_to_sparsify(cli) -> None:
    code, _, error = cli("quantize", "--bits", 4, "--method", "alps")
    assert code == 2 and "run `requant sparsify --method alps`" in error
    code, _, error = cli("quantize", "--bits", 4, "--mode", "sparse")
    assert code == 2 and "mode sparse prunes to 2:4: run `requant sparsify`, or choose another" in error


def verdict(*, bits: int, kl: float, theirs: float, measured: bool, large: float = 1.0) -> SparseVerdict:
    codes = PlainCodes(budget=3.0, bits=3.0, bytes=300, predicted=theirs, kl=theirs if measured else None)
    return SparseVerdict(
        bits=3.0, bytes=300, dense_bytes=1600, kl=kl, value_bits=bits, large_fraction=large, codes=codes
    )


def test_the_verdict_follows_the_numbers() -> None:
    streams, batches = verdict(bits=4, kl=0.5, theirs=0.1, measured=False).sentences()
    assert "take plain codes (`requant quantize --mode best --bits 3 --head-bits 16`)" in streams
    assert "0.1000 (predicted)" in streams and "take plain codes; no kernel here multiplies" in batches
    streams, batches = verdict(bits=16, kl=0.1, theirs=0.5, measured=True).sentences()
    assert "take 2:4; its KL is 0.1000" in streams and "0.5000 (measured)" in streams
    assert "take 2:4 only where its products run (in requant on Ampere to Hopper" in batches
    assert "bfloat16, and" in batches
    _, batches = verdict(bits=16, kl=0.1, theirs=0.5, measured=True, large=0.83).sentences()
    assert "times the speed of dense bfloat16 for 83% of the weights, and" in batches
    _, batches = verdict(bits=16, kl=0.5, theirs=0.1, measured=True, large=0.0).sentences()
    assert (
        "take plain codes; sparse products are known to be faster from 4096 rows and columns on only"
        in batches
    )
    rows = {row[""]: row for row in verdict(bits=16, kl=0.1, theirs=0.5, measured=True).rows()}
    assert rows["speed of one stream by its bytes, dense 16 bits = 1"]["2:4"] == "5.33"
