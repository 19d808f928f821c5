"""The vLLM plugin over embedding and head: in their codes, tied or apart, and where a folded stream enters and leaves."""

from typing import Any

import pytest
import torch

from requant.errors import ModelError
from requant.formats.quantized_weight import QuantizedWeight, pack
from requant.models.rotations import Rotation

from .vllm_layers import HIDDEN, close, load


@pytest.mark.parametrize("prefix", ["model.embed_tokens", ""])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["asymmetric", "trellis-rows", "bands"])
def test_a_quantized_vocabulary(engine, matrix, kind: str, ranks: int, prefix: str) -> None:
    """Every rank looks its tokens' rows up in codes, and a tied head multiplies with the same; no floats are held."""
    table = matrix(70, HIDDEN, kind, bits=6, density=0)
    found = vocabulary_config(engine, matrix, {"model.embed_tokens": table})
    floats = torch.nn.functional.pad(table.dequantize(), (0, 0, 0, 128 - 70))  # to a multiple of 64
    own, x = 128 // ranks, torch.randn(3, HIDDEN)
    for rank in range(ranks):
        engine.ranks(rank, ranks)
        layer = engine.embedding.VocabParallelEmbedding(70, HIDDEN, quant_config=found, prefix=prefix)
        head = engine.embedding.ParallelLMHead(70, HIDDEN, quant_config=found, prefix="lm_head")
        head = head.tie_weights(layer)
        load(layer, table)
        layer.quant_method.process_weights_after_loading(layer)
        head.quant_method.process_weights_after_loading(head)
        for module in (layer, head):
            assert not [name for name, tensor in module.named_parameters() if tensor.numel()]
        mine = floats[rank * own : (rank + 1) * own]
        tokens = torch.tensor([1, min(5, own - 1)])
        if rank * own < 70 - 5:
            close(layer.quant_method.embedding(layer, tokens), mine[tokens])
        for module in (layer, head):  # some models take the embedding itself as head
            close(module.quant_method.apply(module, x), x @ mine.T) if mine.any() else None
            assert module.quant_method.apply(module, x).shape == (3, own)


def vocabulary_config(engine, matrix, tables: dict[str, QuantizedWeight], **more: Any) -> Any:
    block = {"model.layers.0.o_proj": pack(matrix(HIDDEN, HIDDEN))[0].to_json()}
    specs = {name: pack(table)[0].to_json() for name, table in tables.items()}
    entry = {"quant_method": "requant", "format_version": 6, "modules": block} | more
    return engine.plugin.RequantConfig.from_config(entry | ({"vocabulary": specs} if specs else {}))


def test_head_and_embedding_quantized_apart(engine, matrix) -> None:
    """Untied: each has its own codes; a head that is not in the table keeps its floats."""
    tables = {
        name: matrix(64, HIDDEN, "asymmetric", bits=bits, density=0, seed=bits)
        for name, bits in (("model.embed_tokens", 4), ("lm_head", 6))
    }
    found, x = vocabulary_config(engine, matrix, tables), torch.randn(2, HIDDEN)
    head = engine.embedding.ParallelLMHead(64, HIDDEN, quant_config=found, prefix="lm_head")
    load(head, tables["lm_head"])
    head.quant_method.process_weights_after_loading(head)
    close(head.quant_method.apply(head, x), x @ tables["lm_head"].dequantize().T)
    found = vocabulary_config(engine, matrix, {"model.embed_tokens": tables["model.embed_tokens"]})
    head = engine.embedding.ParallelLMHead(64, HIDDEN, quant_config=found, prefix="lm_head")
    head.weight.data.copy_(tables["lm_head"].dequantize())
    head.quant_method.process_weights_after_loading(head)
    close(head.quant_method.apply(head, x), x @ tables["lm_head"].dequantize().T)


def test_tables_whose_kernel_is_wrong_are_floats(engine, matrix, monkeypatch, caplog) -> None:
    table = matrix(64, HIDDEN, "asymmetric", bits=6, density=0)
    found, x = vocabulary_config(engine, matrix, {"model.embed_tokens": table}), torch.randn(2, HIDDEN)
    monkeypatch.setattr(
        "requant.inference.kernel_layers.multiply", lambda x, layout, bias: x.new_zeros(len(x), layout.n)
    )
    layer = engine.embedding.VocabParallelEmbedding(
        64, HIDDEN, quant_config=found, prefix="model.embed_tokens"
    )
    load(layer, table)
    layer.quant_method.process_weights_after_loading(layer)
    assert torch.equal(layer.quant_method.embedding(layer, torch.tensor([3])), table.dequantize()[[3]])
    close(layer.quant_method.apply(layer, x), x @ table.dequantize().T)
    assert "model.embed_tokens and matrices like it are held as float32, 16 bits" in caplog.text


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folded_stream_enters_and_leaves(engine, matrix, monkeypatch, quantized: bool) -> None:
    """The embedding's rows are rotated, the head's input is rotated back and scaled; tied, as Llama and Qwen have them."""
    table, scales = matrix(70, HIDDEN, "asymmetric", bits=6, density=0), torch.rand(HIDDEN) + 0.5
    tables = {"model.embed_tokens": table} if quantized else {}
    found, floats = vocabulary_config(engine, matrix, tables, rotation={"seed": 3}), table.dequantize()
    layer = engine.embedding.VocabParallelEmbedding(
        70, HIDDEN, quant_config=found, prefix="model.embed_tokens"
    )
    head = engine.embedding.ParallelLMHead(70, HIDDEN, quant_config=found, prefix="lm_head")
    if not quantized:
        with pytest.raises(ModelError, match="not pipeline parallelism"):
            head.quant_method.process_weights_after_loading(head)
    head = head.tie_weights(layer)
    if quantized:
        load(layer, table)
    else:
        layer.weight.data[:70] = floats
    parameter = dict(layer.named_parameters())["head_scales"]
    parameter.weight_loader(parameter, scales)
    for each in (layer, head):
        each.quant_method.process_weights_after_loading(each)
    assert "head_scales" not in dict(layer.named_parameters())
    rotation, tokens, x = Rotation(seed=3), torch.tensor([1, 69]), torch.randn(2, HIDDEN)
    rotated, expected = rotation.stream(floats[tokens]), rotation.stream_back(x) * scales @ floats.T
    monkeypatch.setattr("requant.models.rotations.cached_signs", None)  # vLLM's compiler cannot trace that
    close(layer.quant_method.embedding(layer, tokens), rotated)
    for each in (layer, head):
        close(each.quant_method.apply(each, x)[:, :70], expected)
