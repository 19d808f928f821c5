"""`requant bench`: what it counts, what it prints, what it refuses."""

import json

import pytest
import torch

from requant.errors import InputError
from requant.evaluation.bench import bench, measure, model_bytes


def test_measure(tiny_model) -> None:
    model = tiny_model("llama")
    speed = measure("tiny", model, batch=2, prompt_tokens=8, new_tokens=4, rounds=1)
    assert speed.batch == 2 and not speed.graph and not speed.prompt_graph
    assert speed.decode_tokens_per_s == pytest.approx(2e3 / speed.ms_per_step)
    assert speed.prefill_tokens_per_s > 0 and speed.peak_bytes > speed.model_bytes
    assert speed.model_bytes == 4 * sum(p.numel() for p in model.parameters()) + sum(
        b.numel() * b.element_size() for b in model.buffers() if b.data_ptr()
    )


def test_a_shared_tensor_counts_once(tiny_model) -> None:
    tied = tiny_model("llama-tied")
    assert model_bytes(tied) < model_bytes(tiny_model("llama"))
    assert tied.get_output_embeddings().weight.dtype == torch.float32


def test_tuning_without_a_gpu_is_refused_before_a_model_is_read() -> None:
    with pytest.raises(InputError, match="--autotune measures the kernels of a GPU, and this run is on cpu"):
        bench("no-such-folder", device="cpu", autotune=True)


def test_bench(cli, make_checkpoint, tiny_folder) -> None:
    folder, _ = make_checkpoint("llama")
    small = ("--prompt-tokens", 4, "--new-tokens", 2, "--device", "cpu")
    source = folder.parent / "source"
    code, out, error = cli("bench", folder, "--reference", source, *small)
    assert code == 0 and len(out.splitlines()) == 4, error  # no tokenizer is needed
    (source / "model.safetensors").write_bytes(b"")
    code, out, error = cli("bench", folder, "--batch", "1,2", "--reference", source, *small)
    assert code == 2 and "is truncated or no safetensors file" in error  # but a loadable model is
    code, out, error = cli("bench", tiny_folder("llama"), "--batch", "1,2", *small)
    assert code == 0, error
    assert out.splitlines()[0].split()[:2] == ["model", "batch"] and len(out.splitlines()) == 4
    code, out, error = cli("bench", folder, "--json", *small)
    assert code == 0, error
    (row,) = json.loads(out)
    assert row["batch"] == 1 and row["decode_tokens_per_s"] > 0 and row["graph"] is False


def test_refusals(cli, tiny_folder) -> None:
    folder = tiny_folder("llama")
    code, _, error = cli("bench", folder, "--batch", "1,x", "--device", "cpu")
    assert code == 2 and "--batch 1,x is not a list of whole numbers" in error
    code, _, error = cli("bench", folder, "--prompt-tokens", 200, "--device", "cpu")
    assert code == 2 and "exceed the 128 positions" in error
