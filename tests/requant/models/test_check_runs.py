"""What a model is asked before a run: whether it runs on tokens alone, and calls the linears that are to be quantized."""

import pytest
from torch.nn import functional

from requant.errors import ModelError
from requant.models.loading import check_runs
from requant.models.targets import find_linears


def test_a_linear_that_is_read_and_never_called_is_refused(tiny_model) -> None:
    model = tiny_model("llama")
    names = [target.name for target in find_linears(model)]
    check_runs(model, names)
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: functional.linear(
        mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight
    )
    with pytest.raises(
        ModelError, match=r"reads model\.layers\.1\.mlp\.down_proj without.*--skip '\*\.down_proj'"
    ):
        check_runs(model, names)
    check_runs(model, [name for name in names if not name.endswith("down_proj")])
    assert not any(module._forward_pre_hooks for module in model.modules())
