"""A checkpoint on a GPU: the kernels in the model, steps captured as a graph, the commands."""

import json
from pathlib import Path

import pytest
import torch
from requant_kernels import dispatch, launch_tables

from requant.inference.convert import tune_kernels
from requant.inference.decode import Decoder, generate_tokens
from requant.inference.kernel_layers import KernelLinear, Sibling
from requant.inference.load import load

pytestmark = pytest.mark.gpu
KINDS = ["codebook", "trellis", "symmetric"]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 40, 200])
def test_logits_are_those_of_the_floats(make_checkpoint, kind: str, tokens: int) -> None:
    folder, _ = make_checkpoint("llama", kind=kind)
    served = load(folder, device="cuda", dtype="float16")
    plain = load(folder, device="cuda", dtype="float16", dequantize=True)
    exact = load(folder, device="cuda", dtype="float32", dequantize=True)
    ids = torch.randint(0, 96, (tokens // 40 + 1, min(tokens, 40)), device="cuda")
    with torch.no_grad():
        want = exact(ids).logits
        error, usual = relative(served(ids).logits, want), relative(plain(ids).logits, want)
    int8 = kind == "trellis" and ids.numel() > 64  # where the GPU has these tensor cores
    assert error < max(4e-2 if int8 else 4e-3, 2 * usual)
    kinds = {type(module) for module in served.modules()}
    assert KernelLinear in kinds or kind == "symmetric"  # groups of 48, which no kernel takes
    assert (Sibling in kinds) == (kind != "symmetric")


@pytest.mark.parametrize("kind", ["codebook", "trellis"])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_captured_step_is_the_step(make_checkpoint, kind: str, batch: int) -> None:
    folder, _ = make_checkpoint("llama", kind=kind)
    model = load(folder, device="cuda", dtype="float16")
    ids = torch.randint(0, 96, (batch, 7), device="cuda")
    graph = Decoder(model, length=32)
    plain = Decoder(model, length=32, graph=False, kernel_attention=False)
    assert graph.kernel_attention
    assert relative(graph.prefill(ids), plain.prefill(ids)) < 4e-3
    for _ in range(6):
        assert relative(graph.step(plain.tokens.clone()), plain.step()) < 4e-3
    assert graph.captured is not None and plain.captured is None
    first = graph.logits.clone()
    again = []
    graph.reset()
    graph.prefill(ids)
    for _ in range(2):  # two prompts went through the model itself, these are read by fused blocks
        graph.reset()
        graph.prefill(ids)
        for _ in range(6):
            graph.step()
        again.append(graph.logits.clone())
    assert torch.equal(*again)
    assert relative(again[0], first) < 4e-3 or batch > 1  # the same tokens, unless two were equally likely


def test_commands(make_checkpoint, cli) -> None:
    folder, _ = make_checkpoint("llama", kind="codebook")
    code, out, error = cli(
        "bench",
        folder,
        "--batch",
        "1,2",
        "--prompt-tokens",
        8,
        "--new-tokens",
        4,
        "--dtype",
        "float16",
        "--json",
    )
    assert code == 0, error
    assert [row["graph"] for row in json.loads(out)] == [True, True]


def test_text_is_the_same_with_and_without_a_graph(make_checkpoint) -> None:
    folder, _ = make_checkpoint("llama", kind="codebook")
    model, prompt = load(folder, device="cuda", dtype="float16"), torch.arange(1, 9, device="cuda")[None]
    settings = {"max_new_tokens": 12, "temperature": 1.0}
    texts = [
        generate_tokens(model, prompt, generator=torch.Generator("cuda").manual_seed(3), **settings)
        for _ in range(2)
    ]
    assert texts[0] == texts[1] and len(texts[0]) == 12


def test_tuning_is_kept(make_checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch_tables.CACHE_VARIABLE, str(tmp_path / "kernels.json"))
    folder, _ = make_checkpoint("llama", kind="codebook")
    model = load(folder, device="cuda", dtype="float16")
    dispatch.forget()
    added = tune_kernels(model, tokens=(1,))
    kept = json.loads((tmp_path / "kernels.json").read_text())[torch.cuda.get_device_name()] if added else {}
    assert len(kept) == added
    assert tune_kernels(model, tokens=(1,)) == 0
    dispatch.forget()
