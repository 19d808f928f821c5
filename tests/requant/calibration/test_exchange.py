"""What a batch says about all matrices, counted before and given in a pass; `tests/requant/test_ranks.py` sends it."""

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
