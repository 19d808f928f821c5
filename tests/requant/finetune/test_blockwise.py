"""Training block by block: the gradients of the whole model, in a fraction of its memory."""

import pytest
import torch

from requant import models, ranks
from requant.calibration.passes import recomputed_blocks
from requant.finetune import blockwise, compile_blocks, weight_stack
from requant.finetune.compile_blocks import fused
from requant.finetune.loss import loss_sum
from requant.finetune.recomputed_block import LearningBlock
from requant.finetune.sixteen_bit_adam import SixteenBitAdam
from requant.finetune.teacher import HeadTeacher, Teacher
from requant.models.experts import grouped_products
from requant.models.stacked import lie_in_a_row, stacked
from requant.models.targets import find_blocks

from .coded_model import Problem


def gradients_of_the_whole(
    problem: Problem, original, tokens, hidden_weight: float = 0.0
) -> dict[str, torch.Tensor]:
    """By one backward pass through everything."""
    for tensor in (*problem.learning.values(), *(weight.parameter for weight in problem.derived)):
        tensor.requires_grad_(True)
    for weight in problem.derived:
        weight.apply()
    teacher = Teacher(original, tokens)
    (loss_sum(problem.model, teacher, tokens, hidden_weight=hidden_weight) / 64).backward()
    for weight in problem.derived:
        weight.backward()
    found = {
        name: tensor.grad.clone() for name, tensor in problem.learning.items() if tensor.grad is not None
    }
    for tensor in (*problem.learning.values(), *(weight.parameter for weight in problem.derived)):
        tensor.grad = None
    return found


def gradients_block_by_block(
    problem: Problem,
    teacher: HeadTeacher,
    chosen,
    monkeypatch,
    hidden_weight: float = 0.0,
    graphs_kept: int = 0,
) -> dict[int, torch.Tensor]:
    """What Adam gets in a step, by tensor; in parts of two windows and of seven positions."""
    found: dict[int, torch.Tensor] = {}

    def note(self: SixteenBitAdam) -> None:
        for tensor in self.tensors:
            if tensor.grad is not None:
                assert id(tensor) not in found and tensor.grad.dtype == torch.float32
                found[id(tensor)] = tensor.grad.clone()

    monkeypatch.setattr(SixteenBitAdam, "step", note)
    monkeypatch.setattr(blockwise, "positions_at_once", lambda *_: 7)
    monkeypatch.setattr(blockwise, "TOKENS_AT_ONCE", 32)
    with recomputed_blocks(problem.model, False):
        step = problem.step(teacher, hidden_weight, graphs_kept)
        step(teacher.micro_batches(chosen, None), 1.0)
        step.close()
    return found


MODELS = ("llama", "llama-tied", "gpt2", "gemma2", "phi3", "gpt-neox", "qwen3-moe", "gpt-oss", "llama4")
HANDED_ON = ("zaya", "gemma4-per-layer")  # blocks read more than hidden states, with gradients


@pytest.mark.parametrize(
    ("name", "hidden_weight"),
    [*((name, 0.0) for name in (*MODELS, *HANDED_ON)), ("llama", 3.0), ("gemma2", 3.0), ("llama4", 3.0)],
)
def test_gradients_are_those_of_the_whole_model(
    tiny_model, random_weight, windows, monkeypatch, name, hidden_weight
) -> None:
    original = tiny_model(name)
    teacher = HeadTeacher(original, windows)
    problem = Problem(tiny_model(name), random_weight)
    chosen = torch.tensor([4, 1, 5, 0])
    expected = gradients_of_the_whole(problem, original, windows[chosen], hidden_weight)
    found = gradients_block_by_block(problem, teacher, chosen, monkeypatch, hidden_weight)
    assert len(expected) == len(found) > len(problem.derived)
    for key, tensor in problem.learning.items():
        if key in expected:
            error = (found[id(tensor)] - expected[key]).norm()
            assert error <= 1e-4 * expected[key].norm() + 1e-8, key
            assert tensor.grad is None
    assert not any("forward" in block.__dict__ for block in find_blocks(problem.model)[1])


@pytest.mark.parametrize("name", [*MODELS, *HANDED_ON])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.usefixtures("products_of_a_gpu")
def test_gradients_of_products_in_bfloat16_are_those_of_the_whole_model(
    tiny_model, random_weight, windows, monkeypatch, name, dtype, device
) -> None:
    """Of a model in float32, and of one whose original and codes are bfloat16; mixtures in grouped products."""
    original, chosen = tiny_model(name).to(device, dtype), torch.tensor([4, 1, 5, 0])
    teacher = HeadTeacher(original, windows)
    assert teacher.states.dtype == torch.bfloat16
    problem = Problem(tiny_model(name).to(device), random_weight, dtype=dtype)
    with grouped_products(problem.model):
        expected = gradients_of_the_whole(problem, original, windows[chosen].to(device))
        for target in problem.coded:  # a run widens all else
            target.parameter.data = target.parameter.data.to(dtype)
        found = gradients_block_by_block(problem, teacher, chosen, monkeypatch)
    assert len(expected) == len(found) > len(problem.derived)
    for key, gradient in expected.items():
        assert (found[id(problem.learning[key])] - gradient).norm() <= 0.03 * gradient.norm(), key


@pytest.mark.parametrize("name", [*MODELS, *HANDED_ON])
def test_blocks_whose_graphs_are_kept_are_computed_once(
    tiny_model, random_weight, windows, monkeypatch, name
) -> None:
    """To the same gradients, bit for bit."""
    teacher, chosen = HeadTeacher(tiny_model(name), windows), torch.tensor([4, 1, 5, 0])
    blocks, plain, calls = len(find_blocks(tiny_model(name))[1]), LearningBlock._result, 0

    def counted(block, *rest):
        nonlocal calls
        calls += 1
        return plain(block, *rest)

    monkeypatch.setattr(LearningBlock, "_result", counted)
    found = []
    for kept in range(blocks + 1):
        problem, calls = Problem(tiny_model(name), random_weight), 0
        gradients = gradients_block_by_block(problem, teacher, chosen, monkeypatch, graphs_kept=kept)
        assert calls == 2 * (2 * blocks - kept)  # two chunks, forward and backward
        learning = problem.learning.items()
        found.append({key: gradients[id(t)] for key, t in learning if id(t) in gradients})
    first, *others = found
    assert blocks > 1
    for other in others:
        assert other.keys() == first.keys() and all(torch.equal(other[key], first[key]) for key in first)


def test_validation_keeps_no_graphs(tiny_model, random_weight, windows) -> None:
    problem = Problem(tiny_model("llama"), random_weight)
    with recomputed_blocks(problem.model, False):
        step = problem.step(HeadTeacher(tiny_model("llama"), windows[:4], windows[4:]), graphs_kept=1)
        step.mean_kl()
        assert not step.chunks.graphs and not any(block.built for block in step.blocks)
        step.close()


def test_validation_takes_as_many_windows_at_once_as_a_step(tiny_model, random_weight, windows) -> None:
    """Weights are made once for all of them."""
    found, built = [], []
    for at_once in (1, 4):
        problem = Problem(tiny_model("llama"), random_weight)
        teacher = HeadTeacher(tiny_model("llama"), windows[:1], windows[1:])
        calls = 0

        def counted(value):
            nonlocal calls
            calls += 1
            return value

        for weight in problem.derived:
            object.__setattr__(weight, "value", lambda value=weight.value: counted(value()))
        with recomputed_blocks(problem.model, False):
            step = problem.step(teacher, batch_tokens=at_once * windows.shape[1])
            found.append(step.mean_kl())
            step.close()
        built.append(calls)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    count = len(windows) - 1
    assert built == [count * len(problem.derived), -(-count // 4) * len(problem.derived)]


@pytest.mark.usefixtures("products_of_a_gpu")
def test_matrices_of_experts_are_computed_together_and_read_where_they_lie(
    tiny_model, random_weight, windows, monkeypatch
) -> None:
    problem = Problem(tiny_model("qwen3-moe"), random_weight, ("gate_proj", "up_proj", "down_proj"))
    blocks = len(find_blocks(problem.model)[1])
    experts = len(problem.coded) // blocks // 3
    copied: list[bool] = []

    def noted(tensors):
        copied.append(not lie_in_a_row(tensors))
        return stacked(tensors)

    for module in (models.experts, weight_stack):
        monkeypatch.setattr(module, "stacked", noted)
    teacher = HeadTeacher(tiny_model("qwen3-moe"), windows)
    with recomputed_blocks(problem.model, False), grouped_products(problem.model):
        step = problem.step(teacher)
        for block in step.blocks:
            assert [len(each.parameters) for each in block.computed] == [experts] * 3
        step(teacher.micro_batches(torch.tensor([4, 1]), None), 1.0)
        step.close()
    # of every kind: weights forward and again with a graph, and their gradients
    assert copied == [False] * (blocks * 3 * 3)


@pytest.mark.parametrize("graphs_kept", [0, 1])
def test_a_rank_without_windows_takes_part(
    tiny_model, random_weight, windows, monkeypatch, graphs_kept: int
) -> None:
    """It sends parts and gradients of zero, matrix by matrix in the order of the others."""
    sent: list[tuple[str, torch.Size]] = []

    def all_gather(received: list[torch.Tensor], part: torch.Tensor) -> None:
        sent.append(("parts", part.shape))
        for row in received:
            row.copy_(part)

    def all_to_all(received: torch.Tensor, rows: torch.Tensor) -> None:
        sent.append(("gradients", rows.shape))
        received.copy_(rows)

    class Done:
        def wait(self) -> None:
            pass

    def all_reduce(tensor: torch.Tensor, async_op: bool) -> Done:
        sent.append(("gradients", tensor.shape))
        return Done()

    teacher = HeadTeacher(tiny_model("qwen3-moe"), windows)
    monkeypatch.setattr(ranks, "world_size", lambda: 2)
    monkeypatch.setattr(ranks.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(ranks.dist, "all_gather", all_gather)
    monkeypatch.setattr(ranks.dist, "all_to_all_single", all_to_all)
    found, matrices, stay = [], 0, 0
    for idle in (False, True):
        problem = Problem(tiny_model("qwen3-moe"), random_weight)
        sent.clear()
        with recomputed_blocks(problem.model, False):
            step = problem.step(teacher, graphs_kept=graphs_kept)
            step([] if idle else teacher.micro_batches(torch.arange(2), None), 1.0)
        found.append(list(sent))
        matrices = len(step.divided)
        stay = sum(len(block.divided) for block in step.blocks if block.stays)
    assert found[0] == found[1]
    assert matrices and [kind for kind, _ in sent].count("gradients") > matrices  # and all else
    assert (stay > 0) == (graphs_kept > 0)
    assert [kind for kind, _ in sent].count("parts") == 2 * matrices - stay  # forward and backward


@pytest.mark.filterwarnings("default")  # the compiler looks where torch warns
@pytest.mark.parametrize("graphs_kept", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_blocks_are_compiled_once_for_all_phases(
    tiny_model, random_weight, windows, counting_compiler, graphs_kept: int
) -> None:
    """Whatever is coded: weights that are built look as those that are kept."""
    model, teacher = tiny_model("llama"), HeadTeacher(tiny_model("llama"), windows)
    for kinds in (("q_proj", "k_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")):
        problem = Problem(model, random_weight, kinds)
        with fused((model,), compile_blocks.MIN_STEPS_TO_COMPILE):
            step = problem.step(teacher, graphs_kept=graphs_kept)
            step(teacher.micro_batches(torch.arange(4), None), 1.0)
            step.close()
    # without a graph and with one, for the first block and the others
    assert len(find_blocks(model)[1]) > 1 and counting_compiler.frame_count <= 3
