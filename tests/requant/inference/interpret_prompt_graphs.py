"""Run under TRITON_INTERPRET=1 by `test_prompt_graphs.py`: replays of padded prompts, by the kernels of a step and
`fake_cuda_graphs.py`, give the logits and the cache of transformers' forward, and so do steps and more of the text."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

import fake_cuda_graphs
import interpreter_fixes  # noqa: F401
import pytest
import torch
from fake_cuda_graphs import FakeGraph, storage
from interpret_fused_step import SIZES, close
from transformers import AutoConfig, AutoModelForCausalLM

from requant.inference import prompt_graphs
from requant.inference.decode import Decoder
from requant.inference.prompt_graphs import PromptGraphs
from requant.inference.static_cache import static_cache

ROOM = 40


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    fake_cuda_graphs.install(pytest.MonkeyPatch())
    prompt_graphs.LENGTHS = (4, 8)
    config = AutoConfig.for_model("qwen3", **SIZES)
    model = AutoModelForCausalLM.from_config(config).half().eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(1 + 0.3 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    own, fused = Decoder(model, length=ROOM), Decoder(model, length=ROOM)
    fused.cache, fused.prompt_graphs = static_cache(model, ROOM), PromptGraphs()
    fused.fuses_prompts = True  # as on a GPU
    replays = []
    # by the model, compared, as they are, captured, replayed; then longer and shorter ones, which other kernels multiply
    for count in (3, 4, 3, 4, 3, 7, 5, 6, 8, 7, 1, 2, 1):
        prompts, more = torch.randint(0, 60, (2, count)), torch.randint(0, 60, (2, 2))
        own.cache = static_cache(model, ROOM)
        fused.cache.reset()
        for tokens in (prompts, more)[: 1 + count % 2]:
            own.prefill(tokens)
            assert close(fused.prefill(tokens), own.logits), f"logits of {tokens.shape}"
            assert torch.equal(fused.cache.length, own.cache.length)
            for mine, wanted in zip(fused.cache.layers, own.cache.layers, strict=True):
                length = int(own.cache.length)
                for got, want in ((mine.keys, wanted.keys), (mine.values, wanted.values)):
                    assert close(got[:, :, :length], want[:, :, :length]), f"cache of {tokens.shape}"
        fused.tokens.copy_(own.tokens)
        assert close(fused.step(), own.step()), f"the step after {prompts.shape}"
        replays.append(sum(graph.replays for graph in FakeGraph.made))
    assert replays == [0, 0, 0, 1, 2, 2, 2, 2, 3, 4, 4, 4, 5], replays
    static = [*model.parameters(), *model.buffers(), fused.cache.length]
    static += [tensor for layer in fused.cache.layers for tensor in (layer.keys, layer.values)]
    for fake, graph in zip(FakeGraph.made, fused.prompt_graphs.graphs.values(), strict=True):
        allowed = {storage(tensor) for tensor in (*static, graph.tokens, graph.last)}
        assert fake.external.keys() <= allowed
        assert {
            storage(graph.tokens),
            storage(graph.last),
            storage(fused.cache.length),
        } <= fake.external.keys()


if __name__ == "__main__":
    main()
