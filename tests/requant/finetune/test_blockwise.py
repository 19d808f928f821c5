"""Training block by block: the gradients of the whole model, in a fraction of its memory."""

import gc
from pathlib import Path

import pytest
import torch

from requant import ranks
from requant.calibration.passes import recomputed_blocks
from requant.errors import InputError
from requant.finetune import blockwise, compile_blocks, final
from requant.finetune import teacher as module
from requant.finetune.blockwise import BlockwiseStep
from requant.finetune.compile_blocks import Divergence, fused, kl
from requant.finetune.final import finetune, teacher_of, trains_by_block
from requant.finetune.loop import loss_sum
from requant.finetune.memory import training_bytes
from requant.finetune.recomputed_block import LearningBlock
from requant.finetune.sixteen_bit_adam import SixteenBitAdam
from requant.finetune.step import ReparametrizedWeight, TrainableTensor, adam
from requant.finetune.teacher import HeadTeacher, Teacher
from requant.formats.quantized_weight import trainable_params, weight_function
from requant.models import mixed_precision
from requant.models.experts import grouped_products, unfuse_experts
from requant.models.targets import find_blocks, find_linears
from requant.pipeline.best import best
from requant.pipeline.prepare import prepare, start
from requant.quantizers.registry import METHODS
from requant.recipe.schema import Calibration, Evaluation, Finetune, Recipe
from requant.run.context import RunContext
from requant.run.quantize_linears import quantize_linears
from requant.run.workspace import Workspace


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(0, 200, (6, 16))


class Problem:
    """A model with every second matrix coded, or those of some kinds, its teacher, and all that learns by name."""

    def __init__(self, model, random_weight, kinds: tuple[str, ...] = (), dtype=torch.float32) -> None:
        unfuse_experts(model)
        self.model = model
        targets = find_linears(model)
        self.coded = [target for target in targets if target.kind in kinds] if kinds else targets[::2]
        weights = {
            t.name: random_weight(*t.shape, kind="trellis", seed=i).to(model.device)
            for i, t in enumerate(self.coded)
        }
        self.params = {name: trainable_params(weight) for name, weight in weights.items()}
        self.derived = []
        for target in self.coded:
            floats, params = weight_function(weights[target.name], dtype), self.params[target.name]
            value = lambda floats=floats, params=params, target=target: target.oriented(floats(params))  # noqa: E731
            self.derived.append(ReparametrizedWeight(parameter=target.parameter, value=value))
        coded = {id(target.parameter) for target in self.coded}
        self.learning = {name: p for name, p in model.named_parameters() if id(p) not in coded}
        for name, params in self.params.items():
            self.learning |= {f"{name}.{field}": value for field, value in params.items()}

    def step(self, teacher: HeadTeacher, kl_of: Divergence = kl, hidden_weight: float = 0.0) -> BlockwiseStep:
        return BlockwiseStep(
            self.model,
            teacher,
            [TrainableTensor(tensor=t, lr=1e-2) for t in self.learning.values()],
            self.derived,
            batch_tokens=64,
            kl_of=kl_of,
            hidden_weight=hidden_weight,
        )


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


@pytest.fixture
def products_of_a_gpu(monkeypatch) -> None:
    """Training on the CPU multiplies in bfloat16, as it does on a GPU."""
    monkeypatch.setitem(mixed_precision.PRODUCTS, "cpu", torch.bfloat16)


def gradients_block_by_block(
    problem: Problem, teacher: HeadTeacher, chosen, monkeypatch, hidden_weight: float = 0.0
) -> dict[int, torch.Tensor]:
    """What Adam gets in a step, by tensor; in parts of two windows and of seven positions."""
    found: dict[int, torch.Tensor] = {}

    def note(self: SixteenBitAdam) -> None:
        for tensor in self.tensors:
            if tensor.grad is not None:
                assert id(tensor) not in found and tensor.grad.dtype == torch.float32
                found[id(tensor)] = tensor.grad.clone()

    monkeypatch.setattr(SixteenBitAdam, "step", note)
    monkeypatch.setattr(blockwise, "positions_at_once", lambda _: 7)
    monkeypatch.setattr(blockwise, "TOKENS_AT_ONCE", 32)
    with recomputed_blocks(problem.model, False):
        step = problem.step(teacher, hidden_weight=hidden_weight)
        step(teacher.micro_batches(chosen, None), 1.0)
        step.close()
    return found


MODELS = ("llama", "llama-tied", "gpt2", "gemma2", "phi3", "gpt-neox", "qwen3-moe", "gpt-oss")


@pytest.mark.parametrize(
    ("name", "hidden_weight"), [*((name, 0.0) for name in MODELS), ("llama", 3.0), ("gemma2", 3.0)]
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
            torch.testing.assert_close(found[id(tensor)], expected[key], rtol=1e-4, atol=1e-6)
            assert tensor.grad is None
    assert not any("forward" in block.__dict__ for block in find_blocks(problem.model)[1])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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


def test_moments_of_sixteen_bits_learn_as_those_of_adam() -> None:
    start, goal = torch.randn(64, 64), torch.randn(64, 64)
    ends = []
    for optimizer_of in (SixteenBitAdam, lambda groups: adam(groups, captures=False)):
        weight = start.clone().requires_grad_(True)
        optimizer = optimizer_of([{"params": [weight], "lr": 0.01}])
        for _ in range(60):
            (weight - goal + 0.3 * torch.randn(64, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weight.detach())
    moved = (ends[1] - start).norm()
    assert moved > 0.3 * (goal - start).norm()
    assert (ends[0] - ends[1]).norm() < 0.2 * moved  # the noise differs, too


def test_moments_rest_in_sixteen_bits() -> None:
    weight = torch.randn(8, 8).requires_grad_(True)
    optimizer = SixteenBitAdam([{"params": [weight], "lr": 0.01}])
    weight.square().sum().backward()
    optimizer.step()
    (state,) = (each.state[weight] for each in optimizer.each)
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert weight.dtype == torch.float32


class Exhausted:
    """Memory that runs out for more than `windows` windows at once, once in `times`."""

    def __init__(self, monkeypatch, *, windows: int, times: int) -> None:
        self.left, plain = times, LearningBlock._output

        def output(block, hidden, *rest):
            if len(hidden) > windows and self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return plain(block, hidden, *rest)

        monkeypatch.setattr(LearningBlock, "_output", output)


def learned(tiny_model, random_weight, windows) -> tuple[dict[str, torch.Tensor], BlockwiseStep]:
    teacher = HeadTeacher(tiny_model("llama"), windows)
    problem = Problem(tiny_model("llama"), random_weight)
    with recomputed_blocks(problem.model, False):
        step = problem.step(teacher)
        for _ in range(2):
            step(teacher.micro_batches(torch.arange(6), None), 1.0)
        step.close()
    return {name: tensor.detach().clone() for name, tensor in problem.learning.items()}, step


def test_where_memory_runs_out_half_as_much_goes_at_once(
    tiny_model, random_weight, windows, monkeypatch, caplog
) -> None:
    """The step is not lost, nothing is counted twice, and the log says so once."""
    expected, step = learned(tiny_model, random_weight, windows)
    before = step.chunks.positions
    Exhausted(monkeypatch, windows=3, times=1)
    monkeypatch.setattr(blockwise, "TOKENS_AT_ONCE", 6 * 16)
    found, step = learned(tiny_model, random_weight, windows)
    assert (step.chunks.windows, step.chunks.positions) == (3, before // 2)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    (record,) = caplog.records
    assert "memory ran out in training: from now on 3 windows" in record.message


def test_memory_that_runs_out_twice_ends_the_run(tiny_model, random_weight, windows, monkeypatch) -> None:
    Exhausted(monkeypatch, windows=1, times=2)
    with pytest.raises(torch.OutOfMemoryError):
        learned(tiny_model, random_weight, windows)


def test_a_rank_without_windows_takes_part(tiny_model, random_weight, windows, monkeypatch) -> None:
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
    found, matrices = [], 0
    for idle in (False, True):
        problem = Problem(tiny_model("qwen3-moe"), random_weight)
        sent.clear()
        with recomputed_blocks(problem.model, False):
            step = problem.step(teacher)
            step([] if idle else teacher.micro_batches(torch.arange(2), None), 1.0)
        found.append(list(sent))
        matrices = len(step.divided)
    assert found[0] == found[1]
    assert matrices and [kind for kind, _ in sent].count("gradients") > matrices  # and all else
    assert [kind for kind, _ in sent].count("parts") == 2 * matrices  # forward and backward


def test_a_teacher_keeps_the_head_and_states_on_the_host(tiny_model, windows, monkeypatch) -> None:
    """In memory, or in a file where that is short."""
    model = tiny_model("llama-tied")
    expected = model(input_ids=windows).logits
    for free in (10**12, 0):
        monkeypatch.setattr(module, "free_memory", lambda _, free=free: free)
        teacher = HeadTeacher(model, windows[:4], windows[4:])
        assert sum(p.numel() for p in teacher.model.parameters()) < 0.3 * sum(
            p.numel() for p in model.parameters()
        )
        ((tokens, states),) = teacher.micro_batches(torch.tensor([3, 5]), None)
        assert torch.equal(tokens, windows[[3, 5]]) and list(teacher.val) == [4, 5]
        torch.testing.assert_close(teacher.logits(tokens, states), expected[[3, 5]])
    assert len(find_blocks(model)[1]) == 2


def test_a_full_disk_is_said(tiny_model, windows, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "free_memory", lambda _: 0)
    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"No space left on device.*lower finetune.train_windows"):
        HeadTeacher(tiny_model("llama"), windows)


def run_of(folder: Path, text: Path, **changes) -> RunContext:
    recipe = Recipe(
        model=str(folder),
        mode="best",
        method="kmeans",
        quantizer=METHODS["kmeans"].config(bits=2),
        calibration=Calibration(text=(str(text),), num_samples=12, seq_len=32),
        evaluation=Evaluation(context=32, windows=2, samples=0),
        finetune=Finetune(
            **{
                "steps": 12,
                "tokens_per_step": 128,
                "lr": 3e-2,
                "warmup_steps": 2,
                "val_windows": 1,
                "eval_every": 4,
            }
            | changes
        ),
    )
    return start(prepare(str(folder), recipe), recipe, workspace=Workspace(None), quiet=True)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_rounds_and_the_last_phase_end_where_those_of_the_whole_model_do(
    tiny_folder, tiny_text_file, name
) -> None:
    """From the same codes the same floats, but for the moments' last bits; the model is left at the original."""
    found = []
    for by_block in (False, True):
        run = run_of(tiny_folder(name), tiny_text_file, blockwise=by_block)
        originals = {key: p.clone() for key, p in run.model.named_parameters()}
        first = [target for target in run.targets if target.kind in ("q_proj", "c_attn")]
        codes = quantize_linears(run, None, label="quantize")
        rounds = [first, [target for target in run.targets if target not in first]]
        in_rounds = best(run, rounds)
        learned = finetune(run, codes, run.recipe.finetune)
        for key, p in run.model.named_parameters():
            assert torch.equal(p, originals[key]) and p.grad is None and not p.requires_grad, key
        changed = {key: end for key, (_, end) in run.finetuned_params.items()}
        found.append(({t.name: in_rounds[t.name].dequantize() for t in first}, learned, changed, originals))
    (rounds_whole, whole, params_whole, originals), (rounds_block, block, params_block, _) = found
    for key, weight in rounds_whole.items():
        torch.testing.assert_close(rounds_block[key], weight, rtol=0.1, atol=0.05 * weight.std().item())
    for key, weight in whole.items():
        assert torch.equal(weight.dense.codes, block[key].dense.codes)
    distance = sum((params_whole[key] - params_block[key]).norm() ** 2 for key in params_whole)
    learned = sum((params_whole[key] - originals[key]).norm() ** 2 for key in params_whole)
    assert distance < 0.02 * learned


def test_size_and_memory_decide_where_the_recipe_does_not(tiny_model, monkeypatch) -> None:
    model = tiny_model("llama")
    targets, windows = find_linears(model), (64, 32)

    def decided(blockwise: bool | None = None, memory: int | None = None) -> bool:
        settings = Finetune(steps=1, blockwise=blockwise)
        return trains_by_block(model, targets, settings, windows, device_memory=memory)

    whole = training_bytes(
        model, targets, (), Finetune(steps=1), windows, by_block=False, gpu=True, device_memory=10**9
    )
    assert not decided() and decided(True) and not decided(memory=10**9)
    assert decided(memory=round(whole / 2)) and not decided(False, memory=round(whole / 2))
    monkeypatch.setattr(final, "BLOCKWISE_FROM", 1000)
    assert decided() and decided(memory=10**9) and not decided(False)


def test_a_model_whose_head_reads_past_the_base_model_is_trained_as_a_whole(
    tiny_folder, tiny_text_file, caplog
) -> None:
    """OPT calls the decoder inside of its base model."""
    run = run_of(tiny_folder("opt"), tiny_text_file, blockwise=True)
    teacher = teacher_of(run, run.recipe.finetune, run.train_windows)
    assert isinstance(teacher, Teacher) and "is not trained block by block" in caplog.text


@pytest.mark.usefixtures("products_of_a_gpu")
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_a_model_in_float32_is_trained_block_by_block_on_a_gpu(
    tiny_folder, tiny_text_file, caplog, monkeypatch, name
) -> None:
    """Its states are bfloat16 there, which its head takes under autocast alone. It learns as the whole model does."""
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)  # so experts' products are grouped
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ends = []
    for by_block in (False, True):
        run = run_of(tiny_folder(name), tiny_text_file, blockwise=by_block)
        teacher = teacher_of(run, run.recipe.finetune, run.train_windows)
        assert isinstance(teacher, HeadTeacher if by_block else Teacher)
        finetune(run, quantize_linears(run, None, label="quantize"), run.recipe.finetune)
        ends.append({key: end - original for key, (original, end) in run.finetuned_params.items()})
    assert "block by block" not in caplog.text
    distance = sum((ends[0][key] - ends[1][key]).norm() ** 2 for key in ends[0])
    assert distance < 0.05 * sum(change.norm() ** 2 for change in ends[0].values())


def test_too_little_memory_to_try_it_is_no_reason_to_take_more(tiny_model, windows, monkeypatch) -> None:
    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(module, "logits_of_states", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        module.why_states_do_not_suffice(tiny_model("llama"), windows)


@pytest.mark.filterwarnings("default")  # the compiler looks where torch warns
def test_blocks_are_compiled_once_for_all_phases(
    tiny_model, random_weight, windows, counting_compiler
) -> None:
    """Whatever is coded: weights that are built look as those that are kept."""
    model, teacher = tiny_model("llama"), HeadTeacher(tiny_model("llama"), windows)
    for kinds in (("q_proj", "k_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")):
        problem = Problem(model, random_weight, kinds)
        with fused((model,), compile_blocks.MIN_STEPS_TO_COMPILE) as kl_of:
            step = problem.step(teacher, kl_of)
            step(teacher.micro_batches(torch.arange(4), None), 1.0)
            step.close()
    # without a graph and with one, for the first block and the others, and the divergence
    assert len(find_blocks(model)[1]) > 1 and counting_compiler.frame_count <= 4


@pytest.mark.usefixtures("products_of_a_gpu")
def test_a_step_that_is_broken_off_leaves_the_blocks_as_they_were(
    tiny_folder, tiny_text_file, monkeypatch
) -> None:
    """On a GPU blocks are replaced twice, and what came last has to go first."""
    monkeypatch.setattr(compile_blocks, "_on_gpus", lambda models: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    run = run_of(tiny_folder("llama"), tiny_text_file, blockwise=True)
    codes = quantize_linears(run, None, label="quantize")
    monkeypatch.setattr(LearningBlock, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finetune(run, codes, run.recipe.finetune)
    gc.collect()  # an error in a generator that is collected is a warning, and warnings are errors here
    assert not any("forward" in vars(block) for block in find_blocks(run.model)[1])
