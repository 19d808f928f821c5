"""What a batch says about all matrices, counted before and given in a pass; `tests/requant/test_ranks.py` sends it."""

import json

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from requant.calibration.collect import collect
from requant.calibration.exchange import Exchange, exchanged_bytes
from requant.models.targets import find_linears


@pytest.mark.parametrize("needs", [{"hessian", "output_hessian"}, {"hessian"}, {"fisher"}])
@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", torch.float32), ("gpt2", torch.float32), ("llama", torch.bfloat16)]
)
def test_what_a_batch_says_takes_what_was_counted(
    tiny_folder, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, needs: set[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(name), dtype=dtype).requires_grad_(False)
    targets = find_linears(model)
    tokens = torch.randint(model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    given: dict[int, Tensor] = {}

    def give(self: Exchange, name: str, *tensors: Tensor) -> None:
        given.update({id(tensor): tensor for tensor in tensors})
        self.use(name, *tensors)

    monkeypatch.setattr(Exchange, "give", give)
    collect(model, tokens, targets, needs=frozenset(needs))
    found = sum(tensor.nbytes for tensor in given.values())
    # and what is sent and received of it, all at once where it is little
    assert exchanged_bytes(model, targets, tokens.numel(), frozenset(needs), kind="cpu") == 3 * found
    by_block = exchanged_bytes(model, targets, tokens.numel(), frozenset(needs), kind="cpu", by_block=True)
    assert by_block * len({target.block for target in targets}) == 3 * found


def test_inputs_without_gradients_have_the_dtype_of_the_model_on_a_gpu_too(tiny_folder) -> None:
    """Of a float32 model products are in 16 bits where gradients are taken alone."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.float32)
    targets = find_linears(model)

    def counted(needs: set[str], kind: str) -> int:
        return exchanged_bytes(model, targets, 32, frozenset(needs), kind=kind)

    assert counted({"hessian"}, "cuda") == counted({"hessian"}, "cpu")
    both = {"hessian", "output_hessian"}
    assert 2 * counted(both, "cuda") == counted(both, "cpu")


HASHES = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from requant import ranks
from requant.calibration import batches, exchange
from requant.calibration.collect import collect
from requant.models.experts import unfuse_experts
from requant.models.targets import divided, find_linears
from requant.run.workspace import digest

exchange.AT_ONCE = 2000  # bytes: one or a few matrices of these
batches.chunks = lambda windows, model, windows_each, **_: windows.split(1)
with ranks.joined("cpu"):
    model = AutoModelForCausalLM.from_pretrained(FOLDER).requires_grad_(False)
    unfuse_experts(model)
    targets = divided(find_linears(model), ranks.world_size())
    windows = torch.randint(model.config.vocab_size, (5, 8), generator=torch.Generator().manual_seed(0))
    hashes = {}
    for needs in (("hessian", "output_hessian"), ("hessian",), ("fisher",)):
        found = collect(model, windows, targets, needs=frozenset(needs))
        own = {name: [digest(getattr(stats, field)) for field in needs] for name, stats in found.items()}
        hashes["+".join(needs)] = ranks.of_all(targets, own)
    print(json.dumps(hashes), file=sys.__stdout__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt-neox", "deepseek-v3"])
def test_statistics_in_groups_are_those_of_one_process(tiny_folder, in_processes, family: str) -> None:
    """Of families in which matrices share a tensor though another comes between them."""
    script = HASHES.replace("FOLDER", repr(str(tiny_folder(family))))
    one, two = (json.loads(in_processes(script, count)[0].splitlines()[-1]) for count in (1, 2))
    assert one == two
    assert set(one) == {"hessian+output_hessian", "hessian", "fisher"}
