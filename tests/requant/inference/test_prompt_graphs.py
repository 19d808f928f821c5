"""Graphs of prompts: of which lengths, when they are captured, that they read nothing but what is meant to change, and what
stops them. On a CPU by `fake_cuda_graphs.py`."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from requant.inference import prompt_graphs
from requant.inference.decode import Decoder
from requant.inference.fused_prefill import kind_of
from requant.inference.prompt_graphs import PromptGraphs, most_rows, padded_length
from requant.models.experts import STEP_TOKENS, Experts, unfuse_experts

from .fake_cuda_graphs import POOL, FakeGraph, install, storage

ROOM = 100


@pytest.mark.parametrize(
    ("sequences", "tokens", "room", "rows", "wanted"),
    [
        (1, 1, 100, 512, 16),
        (1, 16, 100, 512, 16),
        (1, 17, 100, 512, 64),
        (1, 257, 8192, 512, 384),
        (1, 512, 640, 512, 512),
        (1, 513, 8192, 512, None),  # the GPU is busy for longer than Python
        (1, 300, 360, 512, None),  # the padded prompt does not fit the cache
        (8, 60, 8192, 512, 64),
        (8, 65, 8192, 512, None),
    ],
)
def test_lengths(sequences: int, tokens: int, room: int, rows: int, wanted: int | None) -> None:
    assert padded_length(sequences, tokens, room=room, rows=rows) == wanted


def test_graphs_end_where_the_gpu_is_the_slower() -> None:
    def rows(**sizes: int) -> int:
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**sizes))
        return most_rows(SimpleNamespace(config=config, modules=list))

    llama_8b = rows(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
    assert 1024 <= llama_8b < 1280
    assert 256 <= rows(
        hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8
    ) < 384  # fmt: skip
    assert rows(hidden_size=64, intermediate_size=64, num_attention_heads=4) == prompt_graphs.MOST_ROWS


def test_graphs_end_where_experts_ask_the_device(tiny_model) -> None:
    model = tiny_model("qwen3-moe").eval()
    unfuse_experts(model)
    assert most_rows(model) == 0
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in layers:
        layer.step = lambda x, *_: x
    assert most_rows(model) == STEP_TOKENS
    for layer in layers:
        layer.prefill = lambda x, *_: x
    assert most_rows(model) == prompt_graphs.MOST_ROWS
    config = model.config
    config.hidden_size, config.moe_intermediate_size, config.num_attention_heads = 4096, 14336, 32
    config.num_key_value_heads, config.head_dim = 8, 128
    assert 512 <= most_rows(model) < 768  # of Mixtral 8x7B's two experts


class Text:
    """In place of a model: keys of a cache, and logits that depend on every token up to the last."""

    def __init__(self, sequences: int) -> None:
        self.table, self.head = torch.randn(60, 8), torch.randn(8, 60)
        self.keys = torch.zeros(sequences, ROOM, 8)
        self.reads = 0

    def read(self, tokens: Tensor, last: Tensor | None) -> Tensor:
        self.reads += 1
        x = self.table[tokens].cumsum(1)
        self.keys.index_copy_(1, torch.arange(tokens.shape[1]), x)
        return (x[:, -1] if last is None else x.index_select(1, last)[:, 0]) @ self.head

    def wanted(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table[tokens].cumsum(1)
        return x[:, -1] @ self.head, x


def test_the_second_prompt_of_a_length_is_captured(monkeypatch, caplog) -> None:
    install(monkeypatch)
    text, graphs = Text(2), PromptGraphs()
    prompts = [torch.randint(0, 60, (2, count)) for count in (11, 16, 3, 9, 40, 50, 16, 30)]
    found = []
    with caplog.at_level(logging.INFO, logger="requant.inference"):
        for tokens in prompts:
            length = padded_length(*tokens.shape, room=ROOM, rows=512)
            assert length is not None
            text.keys.zero_()
            logits, (wanted, keys) = graphs(tokens, length, text.read), text.wanted(tokens)
            found.append(logits is not None)
            if logits is not None:
                torch.testing.assert_close(logits, wanted)
                torch.testing.assert_close(text.keys[:, : tokens.shape[1]], keys)
    assert found == [False, True, True, True, False, True, True, True]
    assert text.reads == 2 * 3  # warmed up, captured, compared: a replay asks nobody
    assert [graph.replays for graph in FakeGraph.made] == [4, 2]
    assert {id(graph.pool) for graph in FakeGraph.made} == {id(POOL)} and graphs.bytes == 2 << 20
    assert "up to 2 x 16 tokens" in caplog.text and "up to 2 x 64 tokens" in caplog.text
    for fake, graph in zip(FakeGraph.made, graphs.graphs.values(), strict=True):
        static = (text.table, text.head, text.keys, graph.tokens, graph.last)
        assert fake.external.keys() == {storage(tensor) for tensor in static}


def asks_the_host(text: Text, tokens: Tensor, last: Tensor | None) -> Tensor:
    return text.read(tokens[:, : tokens.shape[1] if last is None else int(last) + 1], None)


def keeps_a_number_of_the_host(text: Text, tokens: Tensor, last: Tensor | None) -> Tensor:
    return text.read(tokens, None)


def is_out_of_memory(text: Text, tokens: Tensor, last: Tensor | None) -> Tensor:
    if last is not None:
        raise torch.OutOfMemoryError("no memory is left\nmore of it")
    return text.read(tokens, None)


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (asks_the_host, "not permitted when stream is capturing"),
        (keeps_a_number_of_the_host, "other logits"),
        (is_out_of_memory, "no memory is left"),
    ],
)
def test_what_cannot_be_captured_is_read_without(monkeypatch, caplog, read, reason: str) -> None:
    install(monkeypatch)
    text, graphs = Text(1), PromptGraphs()
    for count in (9, 12, 12, 5, 40, 40):
        tokens = torch.randint(0, 60, (1, count))
        length = padded_length(1, count, room=ROOM, rows=512)
        assert length is not None
        logits = graphs(tokens, length, lambda tokens, last: read(text, tokens, last))
        if logits is not None:  # compared, and right all the same
            torch.testing.assert_close(logits, text.wanted(tokens)[0])
    (record,) = caplog.records
    assert reason in record.getMessage() and "\n" not in record.getMessage()
    assert graphs.failed and not graphs.graphs and len(FakeGraph.made) <= 1


def test_a_decoders_step_is_captured_and_counts_on(tiny_model, monkeypatch) -> None:
    """By the same capture, of transformers' own step."""
    install(monkeypatch)
    model, tokens = tiny_model("llama"), torch.randint(0, 256, (2, 9))
    plain, graph = Decoder(model, length=24), Decoder(model, length=24, graph=True)
    for prompt in (tokens, tokens[:, :4]):
        plain.reset()
        graph.reset()
        torch.testing.assert_close(graph.prefill(prompt), plain.prefill(prompt), atol=1e-5, rtol=1e-4)
        for _ in range(5):
            torch.testing.assert_close(graph.step(), plain.step(), atol=1e-5, rtol=1e-4)
    (fake,) = FakeGraph.made
    assert graph.captured is fake and fake.replays == 10
    own = [*model.parameters(), *model.buffers(), graph.tokens, graph.logits, graph.cache.length]
    own += [tensor for layer in graph.cache.layers for tensor in (layer.keys, layer.values)]
    assert fake.external.keys() <= {storage(tensor) for tensor in own}


@pytest.mark.slow
def test_in_the_interpreter(interpreted) -> None:
    interpreted("interpret_prompt_graphs.py")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("batch", [1, 5])
def test_replayed_prompts_give_the_same_logits(tiny_model, name: str, batch: int) -> None:
    """Of several lengths, each replay after another's; a continued prompt and steps behind them."""
    model = tiny_model(name).cuda().bfloat16()
    graphs = Decoder(model, length=420, graphs_prompts=True)
    plain = Decoder(model, length=420, fused=False)

    def compare(got: Tensor, wanted: Tensor) -> None:
        assert ((got - wanted).norm() / wanted.norm()).item() < 3e-2

    def prompts(count: int) -> Tensor:
        return torch.randint(0, 256, (batch, count), device="cuda")

    graphs.prefill(prompts(40))
    graphs.step()  # captured: the cache stays
    counts = (40, 60, 33, 150, 180, 64, 130, 200, 50, 40)
    for index, count in enumerate(counts):
        for decoder in (graphs, plain):
            decoder.reset()
        text, more = prompts(count), prompts(7)
        compare(graphs.prefill(text), plain.prefill(text))
        for mine, other in zip(graphs.cache.layers, plain.cache.layers, strict=True):
            compare(mine.keys[:, :, :count], other.keys[:, :, :count])
            compare(mine.values[:, :, :count], other.values[:, :, :count])
        if index % 2:
            compare(graphs.prefill(more), plain.prefill(more))
        for _ in range(3):
            graphs.tokens.copy_(plain.tokens)
            compare(graphs.step(), plain.step())
        assert torch.equal(graphs.cache.length, plain.cache.length)
    assert graphs.prompt_graphs is not None and not graphs.prompt_graphs.failed
    met = {kind_of(batch * count) for count in counts}  # kinds of rows whose blocks have been compared
    assert set(graphs.prompt_graphs.graphs) == {n for n in (64, 256) if kind_of(batch * n) in met}
    assert graphs.prompt_graphs.bytes > 0
