"""The experts of a step on the GPU: beside the experts one by one, in a CUDA graph whose experts change, in a model."""

import pytest
import torch
from requant_kernels import TrellisLayout, linear, pack_trellis
from torch import Tensor
from torch.nn import functional

import requant
from requant.inference.decode import Decoder
from requant.models.experts import Experts
from requant.quantizers.trellis import TrellisConfig
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe

from .cases import random_trellis, relative_error

pytest.importorskip("triton")
from requant_kernels.experts.stack import ExpertStack, stack_experts
from requant_kernels.experts.step import experts_step

pytestmark = pytest.mark.gpu


def stacks(
    code: str, widths: tuple[float, ...], h: int, f: int, experts: int
) -> tuple[ExpertStack, ExpertStack, list[TrellisLayout]]:
    """Gates and ups, downs, and all of their layouts."""
    signs = {k: (torch.randint(0, 2, (k,)) * 2 - 1).half().cuda() for k in (h, f)}

    def matrix(n: int, k: int, expert: int) -> TrellisLayout:
        bits = widths[expert % len(widths)]
        codes, _, scales = random_trellis(n, k, bits, "cuda")
        return pack_trellis(codes, signs[k], scales * 0.02, bits=bits, code=code)

    wide = [matrix(f, h, i % experts) for i in range(2 * experts)]
    narrow = [matrix(h, f, i) for i in range(experts)]
    return stack_experts(wide, parts=2), stack_experts(narrow, parts=1), [*wide, *narrow]


def one_by_one(x: Tensor, matrices: list[TrellisLayout], chosen: Tensor, weights: Tensor) -> Tensor:
    experts, y = len(matrices) // 3, torch.zeros(*x.shape, device="cuda")
    for t, row in enumerate(chosen.tolist()):
        for j, e in enumerate(row):
            gate, up = (linear(x[t : t + 1], matrices[part * experts + e]) for part in (0, 1))
            y[t] += weights[t, j] * linear(functional.silu(gate) * up, matrices[2 * experts + e])[0]
    return y


def choose(m: int, s: int, experts: int) -> Tensor:
    return torch.stack([torch.randperm(experts)[:s] for _ in range(m)]).cuda()


@pytest.mark.parametrize(
    ("code", "widths", "h", "f", "experts", "s"),
    [
        ("mul1", (2,), 2048, 768, 16, 8),
        ("mul1", (2, 2.25, 3, 4), 256, 256, 16, 2),
        ("pair", (2, 1), 2048, 768, 8, 4),
        ("3inst", (2,), 512, 320, 4, 2),
        ("mul1", (3,), 1000, 48, 4, 2),
        ("mul1", (2,), 8192, 1408, 4, 2),
    ],
)
def test_a_step_is_that_of_its_experts_one_by_one(
    code: str, widths: tuple[float, ...], h: int, f: int, experts: int, s: int
) -> None:
    torch.manual_seed(0)
    gate_up, down, matrices = stacks(code, widths, h, f, experts)
    for m in (1, 2, 5, 16, 64):
        x, weights = torch.randn(m, h, device="cuda").bfloat16(), torch.rand(m, s, device="cuda").bfloat16()
        chosen = choose(m, s, experts)
        got = experts_step(x, gate_up, down, chosen, weights)
        assert relative_error(got, one_by_one(x, matrices, chosen, weights).double()) < 1e-2
        for _ in range(10):
            assert torch.equal(got, experts_step(x, gate_up, down, chosen, weights))


@pytest.mark.parametrize("m", [1, 4])
def test_a_graph_reads_the_experts_of_its_replay(m: int) -> None:
    torch.manual_seed(0)
    gate_up, down, matrices = stacks("mul1", (2, 2.25), 2048, 768, 16)
    x, weights = torch.randn(m, 2048, device="cuda").bfloat16(), torch.rand(m, 4, device="cuda").bfloat16()
    router = torch.randn(2048, 16, device="cuda").bfloat16()

    def step() -> tuple[Tensor, Tensor]:
        chosen = (x @ router).topk(4, dim=-1).indices  # a launch before, as in a model
        return chosen, experts_step(x, gate_up, down, chosen, weights)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen, y = step()
    seen = set()
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        seen.update(chosen.flatten().tolist())
        assert relative_error(y, one_by_one(x, matrices, chosen, weights).double()) < 1e-2
    assert len(seen) > 8


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_a_model_with_experts_is_captured(name: str, tiny_folder, tiny_text_file, tmp_path) -> None:
    recipe = Recipe(
        mode="dense",
        method="trellis",
        quantizer=TrellisConfig(bits=4),
        budget=Budget(bits=4.5),
        calibration=Calibration(num_samples=4, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
    )
    requant.save(requant.quantize(str(tiny_folder(name)), recipe, tiny_text_file), tmp_path / "checkpoint")
    model = requant.load(tmp_path / "checkpoint", device="cuda", dtype="bfloat16")
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    assert layers and all(layer.step is not None for layer in layers)
    prompt = torch.arange(20, device="cuda")[None] * 7 % 256
    captured, plain = (Decoder(model, length=64, graph=graph) for graph in (None, False))
    for decoder in (captured, plain):
        decoder.prefill(prompt)
    for token in range(8):
        tokens = torch.full((1, 1), 3 + token, device="cuda")
        found, wanted = captured.step(tokens).float(), plain.step(tokens).float()
        assert relative_error(found, wanted.double()) < 3e-2
    if name == "qwen3-moe":
        assert captured.captured is not None
