"""The experts of a step and of a prompt on the GPU: beside the experts one by one, in a CUDA graph whose experts change,
without a word to the host, in a model."""

import warnings
from dataclasses import replace

import pytest
import torch
from requant_kernels import TrellisLayout, dispatch, linear, pack_trellis
from torch import Tensor
from torch.nn import functional

import requant
from requant.inference.decode import Decoder
from requant.inference.trellis_block import TrellisBlock
from requant.inference.trellis_mixture import TrellisMixture
from requant.models.experts import Experts
from requant.quantizers.trellis import TrellisConfig
from requant.recipe.schema import Budget, Calibration, Evaluation, Recipe

from .cases import random_trellis, relative_error

pytest.importorskip("triton")
from requant_kernels.common.compile_ahead import compile_ahead
from requant_kernels.experts import prefill
from requant_kernels.experts.prefill import bytes_of_row, experts_prefill
from requant_kernels.experts.router import choose_experts
from requant_kernels.experts.stack import ExpertStack, stack_experts
from requant_kernels.experts.step import experts_step, input_form
from requant_kernels.trellis.gemm_sm90_launch import GROUP_TOKENS
from requant_kernels.trellis.gemv import rotate_activations

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def in_float16(monkeypatch: pytest.MonkeyPatch):
    """Experts of prompts are; matrices by themselves would be int8."""
    monkeypatch.setenv("REQUANT_INT8_ACTIVATIONS", "0")
    dispatch.forget()
    yield
    dispatch.forget()


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


hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or not prefill.supports(torch.device("cuda")),
    reason="needs Hopper and Gluon",
)


def skewed(m: int, s: int, experts: int) -> Tensor:
    """Popular experts and rare ones; none chooses expert 1."""
    liking = torch.rand(m, experts) * torch.rand(experts)
    liking[:, 1] = -1
    return liking.topk(s, -1).indices.cuda()


def by_expert(x: Tensor, matrices: list[TrellisLayout], chosen: Tensor, weights: Tensor) -> Tensor:
    """As `one_by_one`, of many tokens."""
    experts, y = len(matrices) // 3, torch.zeros(*x.shape, device="cuda")
    for e in range(experts):
        t, j = (chosen == e).nonzero(as_tuple=True)
        if len(t):
            gate, up = (linear(x[t], matrices[part * experts + e]) for part in (0, 1))
            own = linear(functional.silu(gate) * up, matrices[2 * experts + e])
            y.index_add_(0, t, own.float() * weights[t, j, None].float())
    return y


@hopper
@pytest.mark.parametrize(
    ("dtype", "code", "widths", "h", "f", "experts", "s"),
    [
        (torch.bfloat16, "mul1", (2,), 2048, 768, 128, 8),
        (torch.float16, "mul1", (2, 2.25, 3, 4), 256, 256, 16, 2),
        (torch.bfloat16, "pair", (2, 1), 2048, 768, 8, 4),
        (torch.float16, "3inst", (2,), 512, 320, 4, 2),
        (torch.bfloat16, "mul1", (3,), 1000, 48, 4, 2),
        (torch.bfloat16, "mul1", (5, 2), 512, 1408, 4, 2),
    ],
)
def test_a_prompt_is_that_of_its_experts_one_by_one(
    dtype: torch.dtype, code: str, widths: tuple[float, ...], h: int, f: int, experts: int, s: int
) -> None:
    torch.manual_seed(0)
    gate_up, down, matrices = stacks(code, widths, h, f, experts)
    for m in (1, 65, 300, 1500):
        x, weights = torch.randn(m, h, device="cuda", dtype=dtype), torch.rand(m, s, device="cuda").to(dtype)
        chosen = skewed(m, s, experts)

        def all_launches(given=(x, gate_up, down, chosen, weights)) -> None:
            for tokens in GROUP_TOKENS:
                experts_prefill(*given, tokens_per_cta=tokens)

        compile_ahead(all_launches)
        wanted = by_expert(x, matrices, chosen, weights).double()
        for tokens in (None, *GROUP_TOKENS):
            got = experts_prefill(x, gate_up, down, chosen, weights, tokens_per_cta=tokens)
            assert got.dtype == dtype and relative_error(got, wanted) < 1e-2, tokens
        got = experts_prefill(x, gate_up, down, chosen, weights)
        for _ in range(3):
            assert torch.equal(got, experts_prefill(x, gate_up, down, chosen, weights))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill, "MAX_BYTES", 100 * s * bytes_of_row(gate_up, down, dtype))
            passes = experts_prefill(x, gate_up, down, chosen, weights)
        assert relative_error(passes, wanted) < 1e-2


@hopper
def test_biases_and_another_gate_in_prompts() -> None:
    torch.manual_seed(0)
    gate_up, down, matrices = stacks("mul1", (2, 3), 512, 256, 8)
    gate_up, down = (
        replace(stack, biases=torch.randn(len(stack.index_of), stack.n, device="cuda").bfloat16())
        for stack in (gate_up, down)
    )
    x, weights = torch.randn(200, 512, device="cuda").bfloat16(), torch.rand(200, 2, device="cuda")
    chosen, y = skewed(200, 2, 8), torch.zeros(200, 512, device="cuda")
    assert gate_up.biases is not None and down.biases is not None

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    for e in range(8):
        t, j = (chosen == e).nonzero(as_tuple=True)
        if len(t):
            gate, up = (linear(x[t], matrices[8 * part + e], gate_up.biases[8 * part + e]) for part in (0, 1))
            own = linear(gated(gate, up), matrices[16 + e], down.biases[e])
            y.index_add_(0, t, own.float() * weights[t, j, None])
    got = experts_prefill(x, gate_up, down, chosen, weights, gated=gated)
    assert relative_error(got, y.double()) < 1e-2


@hopper
def test_the_host_does_not_wait_for_a_prompt_and_a_graph_can_hold_it() -> None:
    torch.manual_seed(0)
    gate_up, down, matrices = stacks("mul1", (2, 3), 2048, 768, 16)
    x, weights = (
        torch.randn(400, 2048, device="cuda").bfloat16(),
        torch.rand(400, 4, device="cuda").bfloat16(),
    )
    router = torch.randn(2048, 16, device="cuda").bfloat16()

    def layer() -> tuple[Tensor, Tensor]:
        chosen = (x @ router).topk(4, dim=-1).indices
        return chosen, experts_prefill(x, gate_up, down, chosen, weights)

    layer()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():  # that the mode is a prototype
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen, y = layer()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert relative_error(y, by_expert(x, matrices, chosen, weights).double()) < 1e-2


def choose(m: int, s: int, experts: int) -> Tensor:
    return torch.stack([torch.randperm(experts)[:s] for _ in range(m)]).cuda()


@pytest.mark.parametrize(
    ("code", "widths", "h", "f", "experts", "s"),
    [
        ("mul1", (2,), 2048, 768, 16, 8),
        ("mul1", (2, 2.25, 3, 4), 256, 256, 16, 2),
        ("mul1", (2, 2.25, 2.5, 2.75, 3, 3.25, 3.5, 4), 2048, 768, 16, 8),
        ("pair", (2, 1), 2048, 768, 8, 4),
        ("pair", (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5, 3), 2048, 768, 16, 8),
        ("3inst", (2,), 512, 320, 4, 2),
        ("3inst", (2, 5), 512, 40, 4, 2),
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
        rotated, into = rotate_activations(x, gate_up.layout, input_form(gate_up)), torch.ones_like(x)
        added = experts_step(rotated, gate_up, down, chosen.int(), weights, into=into)
        assert added is into and torch.equal(into, 1 + got)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_router_chooses_as_torch_does(dtype: torch.dtype, normalized: bool) -> None:
    torch.manual_seed(0)
    for m, k, experts, chosen in ((1, 2048, 128, 8), (16, 4096, 8, 2), (64, 7168, 256, 8), (3, 200, 60, 4)):
        y, weight = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, experts))
        found, weights = choose_experts(y, weight / k**0.5, chosen, normalized=normalized)
        logits = (y.double() @ (weight / k**0.5).double().T).to(dtype).float()
        wanted = logits.softmax(-1)
        largest = wanted.topk(chosen).values
        total = largest.sum(-1, keepdim=True) if normalized else 1.0
        assert all(len(set(row)) == chosen for row in found.tolist())
        assert relative_error(weights, (wanted.gather(1, found.long()) / total).double()) < 2e-2
        assert relative_error(wanted.gather(1, found.long()), largest.double()) < 1e-2


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
    assert all((layer.prefill is not None) == prefill.supports(torch.device("cuda")) for layer in layers)
    tokens = torch.arange(100, device="cuda")[None] * 7 % 256
    grouped = model(tokens).logits.float()
    prefills = [layer.prefill for layer in layers]
    for layer in layers:
        layer.prefill = None
    assert relative_error(grouped, model(tokens).logits.double()) < 3e-2
    for layer, own in zip(layers, prefills, strict=True):
        layer.prefill = own
    prompt = torch.arange(20, device="cuda")[None] * 7 % 256
    captured, plain = (Decoder(model, length=160, graph=graph) for graph in (None, False))
    for decoder in (captured, plain):
        decoder.prefill(prompt)
    for token in range(8):
        last = torch.full((1, 1), 3 + token, device="cuda")
        found, wanted = captured.step(last).float(), plain.step(last).float()
        assert relative_error(found, wanted.double()) < 3e-2
    if name == "qwen3-moe":
        assert captured.captured is not None and captured.fused is not None
        mixtures = [block.mlp for block in captured.fused.blocks if isinstance(block, TrellisBlock)]
        assert mixtures and all(isinstance(own, TrellisMixture) and own.step for own in mixtures)
        for _ in range(5):  # by the model, compared, fused, captured, replayed
            captured.reset()
            found, wanted = captured.prefill(tokens[:, :60]), model(tokens[:, :60]).logits[:, -1]
            assert relative_error(found, wanted.double()) < 3e-2
            if prefill.supports(torch.device("cuda")):
                captured.reset()
                found, wanted = captured.prefill(tokens), model(tokens).logits[:, -1]
                assert relative_error(found, wanted.double()) < 3e-2
        assert captured.prompt_graphs is not None and not captured.prompt_graphs.failed
        assert set(captured.prompt_graphs.graphs) >= {64}
