"""Whole models with random weights are built and timed as a checkpoint's model is."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from requant_kernels import TrellisLayout

from eval import end_to_end
from requant.inference.kernel_layers import KernelEmbedding, KernelLinear, Sibling

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, "vocab_size": 128,
}  # fmt: skip


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(end_to_end.SHAPES, "tiny", TINY)


def bits_of(model: torch.nn.Module, name: str) -> list[float]:
    """Bits of the matrix of that name in every block."""
    found = []
    for path, module in model.named_modules():
        if path.endswith(name):
            matrix = module.siblings.matrix if isinstance(module, Sibling) else module
            assert isinstance(matrix, KernelLinear) and isinstance(matrix.layout, TrellisLayout)
            found.append(matrix.layout.bits)
    return found


def test_blocks_count(tiny_shape: None) -> None:
    """A fused step is compared with the model's own, which sees little if blocks add little to the embedding: without
    their attention logits change by 11 % in four blocks of the 1B shape with norms of one, with norms like other weights
    by 0.2 %. But with norms of one 32 blocks amplify what bfloat16 rounds."""
    model = end_to_end.build("tiny", "mul1", 4.0, device="cpu", widths="best", tables="bands")
    norms = [module.weight for module in model.modules() if type(module).__name__.endswith("Norm")]
    assert len(norms) == 7 and all(bool((weight == 0.25).all()) for weight in norms)


def test_matrices_have_the_widths_of_mode_best(tiny_shape: None) -> None:
    torch.manual_seed(0)
    model = end_to_end.build("tiny", "mul1", 2.0, device="cpu", widths="best")
    for name, bits in end_to_end.WIDTHS[2].items():
        assert bits_of(model, name) == list(bits), name
    equal = end_to_end.build("tiny", "mul1", 2.0, device="cpu", widths="equal")
    for name in end_to_end.WIDTHS[2]:
        assert bits_of(equal, name) == [2, 2, 2]


def test_experts_have_widths_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
    monkeypatch.setitem(end_to_end.MIXTURES, "tiny", TINY | experts)
    model = end_to_end.build("tiny", "pair", 2.0, device="cpu", widths="best")
    for name, bits in end_to_end.EXPERT_WIDTHS[2].items():
        assert bits_of(model, f".{name}") == 3 * list(bits), name
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    original = end_to_end.build("tiny", "bf16", 16.0, device="cpu")
    assert original.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 128, 64)


@pytest.mark.parametrize("tables", ["bands", "trellis", "grid"])
def test_embedding_and_head_are_coded(tiny_shape: None, tables: end_to_end.Tables) -> None:
    model = end_to_end.build("tiny", "pair", 2.0, device="cpu", widths="best", tables=tables)
    coded = isinstance(model.model.embed_tokens, KernelEmbedding)
    assert coded == (tables != "grid") and not isinstance(model.lm_head, torch.nn.Linear)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_rows_are_timed_beside_the_first_format(tiny_shape: None, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    end_to_end.main(
        out, shapes=["tiny"], batch=[1, 2], formats=["bf16:16", "grid:2"], prompt_tokens=8, new_tokens=4,
        density=0.01, device="cpu",
    )  # fmt: skip
    data = json.loads(out.read_text())
    assert [(row["name"], row["batch"]) for row in data["rows"]] == [
        ("bf16", 1), ("bf16", 2), ("grid 2-bit, 1.0% sparse", 1), ("grid 2-bit, 1.0% sparse", 2)
    ]  # fmt: skip
    for row in data["rows"]:
        assert "failed" not in row and row["prompt_tokens"] == 8 and row["decode_tokens_per_s"] > 0
    base, quantized = data["rows"][0], data["rows"][2]
    assert base["decode_tokens_per_s_ratio"] == 1
    assert quantized["decode_tokens_per_s_ratio"] == pytest.approx(
        quantized["decode_tokens_per_s"] / base["decode_tokens_per_s"], rel=1e-4
    )
    assert quantized["model_bytes"] < base["model_bytes"]
    assert data["about"]["torch"] == torch.__version__


def test_there_is_no_ratio_to_a_format_that_failed(
    tiny_shape: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bf16 has no memory for two sequences; the next format is not taken in its place."""

    def measured(name: str, _model: object, *, batch: int, **_: object) -> SimpleNamespace:
        if name == "bf16" and batch == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        numbers = dict.fromkeys(("decode_tokens_per_s", "prefill_tokens_per_s", "ms_per_step"), 3.0)
        flags = dict.fromkeys(("graph", "fused", "fused_rotations", "prompt_graph"), False)
        return SimpleNamespace(to_dict=lambda: {**numbers, **flags})

    monkeypatch.setattr(end_to_end, "measure", measured)
    monkeypatch.setattr(end_to_end, "build", lambda *_, **__: torch.nn.Module())
    out = tmp_path / "rows.json"
    end_to_end.main(out, shapes=["tiny"], batch=[1, 2], formats=["bf16:16", "grid:2"], device="cpu")
    rows = json.loads(out.read_text())["rows"]
    assert [row.get("decode_tokens_per_s_ratio") for row in rows] == [1, None, 1, None]
