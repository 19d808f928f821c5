"""2:4 training: products and gradients by hand, masks, decay, the dense end, and that a model learns."""

import pytest
import torch
from torch import nn

from requant.errors import InputError, RecipeError
from requant.sparse_training import sparsify_
from requant.sparse_training.sparsify import METHODS, SparseLinear
from requant.sparsity.masks import keep2, keep2_transposable, least_squares_scale, soft_threshold


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("method", METHODS)
def test_products_and_gradients(method: str) -> None:
    """`Z = X P(W)'`, `dX = dZ P(W)`, and dW straight through."""
    model = Network()
    before = dict(model.named_parameters())
    weight = model.mlp[0].weight.detach().clone()
    training = sparsify_(model, method)
    assert list(training.layers) == ["mlp.0", "mlp.2"] and isinstance(model.attention, nn.Linear)
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    layer, x = model.mlp[0], inputs(2, 6, 16).requires_grad_()
    expected = {
        "s-ste": least_squares_scale(weight) * soft_threshold(weight),
        "transposable": weight * keep2_transposable(weight.abs()),
        "sr-ste": weight * keep2(weight.abs()),
    }[method]
    y = layer(x)
    torch.testing.assert_close(y, x @ expected.T + layer.bias)
    dz = inputs(2, 6, 32)
    y.backward(dz)
    torch.testing.assert_close(x.grad, dz @ expected)
    torch.testing.assert_close(layer.weight.grad, dz.flatten(0, 1).T @ x.detach().flatten(0, 1))
    torch.testing.assert_close(layer.bias.grad, dz.sum((0, 1)))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
def test_activations_of_any_shape(shape: tuple[int, ...]) -> None:
    """As `nn.Linear` takes them, one vector too."""
    model = nn.Sequential()
    model.add_module("mlp", nn.Linear(8, 4))
    sparsify_(model)
    assert model(torch.randn(*shape, 8)).shape == (*shape, 4)


@pytest.mark.parametrize("mvue", [False, True])
def test_autocast_decides_the_dtype_of_products(mvue: bool) -> None:
    """Gradients are computed after autocast has ended, and arrive in the dtype of what they belong to."""
    model = Network()
    training, x = sparsify_(model, mvue=mvue), inputs(8, 16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = training.layers["mlp.2"](training.layers["mlp.0"](x))
    assert y.dtype == torch.bfloat16
    plain = training.layers["mlp.2"](training.layers["mlp.0"](x))
    torch.testing.assert_close(y.float(), plain, rtol=3e-2, atol=3e-2)
    y.sum().backward()
    assert x.grad.dtype == model.mlp[0].weight.grad.dtype == torch.float32


def test_a_bias_leaves_the_dtype_of_autocast() -> None:
    """As that of `nn.Linear` does."""
    dense, model = Network(), Network()
    layer = sparsify_(model).layers["mlp.0"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs(8, 16)).dtype == dense.mlp[0](inputs(8, 16)).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True], ids=["one layer of two names", "two layers of one weight"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_shared_is_sparse_everywhere_and_counts_once(method: str, tied: bool) -> None:
    """The weight decays as it does alone, and so are its 2:4 values at the end."""
    found = []
    for shared in (False, True):
        model = Network()
        if shared:
            model.ffn = nn.Linear(16, 32) if tied else model.mlp[0]
            model.ffn.weight = model.mlp[0].weight
        training, weight = sparsify_(model, method, decay=0.5), model.mlp[0].weight
        weight.grad = torch.zeros_like(weight)
        training.step()
        for kind in (SparseLinear, nn.Linear):
            if shared:
                assert type(model.ffn) is type(model.mlp[0]) is kind
                assert (model.ffn is model.mlp[0]) != tied
            training.densify_(keep_sparse=True)
        found.append((weight.grad, weight.detach()))
    torch.testing.assert_close(*found)


def test_a_model_that_is_a_linear_layer_has_none_to_replace() -> None:
    with pytest.raises(InputError, match="no linear layer is named"):
        sparsify_(nn.Linear(8, 8), layers="*")


def test_the_weight_gradient_of_mvue_is_unbiased() -> None:
    """Within four standard errors; seven tokens are not a multiple of four."""
    layer = sparsify_(Network(), mvue=True).layers["mlp.0"]
    x, dz, found = inputs(7, 16), inputs(7, 32), []
    for _ in range(2000):
        layer.weight.grad = None
        layer(x).backward(dz)
        found.append(layer.weight.grad.clone())
    draws = torch.stack(found)
    error = (draws.mean(0) - dz.T @ x).abs()
    assert (error <= 4.5 * draws.std(0) / len(draws) ** 0.5 + 1e-6).all() and draws.std(0).max() > 0.1


def test_fp8_rounds_the_operands() -> None:
    plain, rounded = (sparsify_(Network(), fp8=fp8).layers["mlp.0"] for fp8 in (False, True))
    x = inputs(8, 16)
    y, z = plain(x), rounded(x)
    assert 1e-4 < ((y - z).norm() / y.norm()).item() < 0.05
    y.backward(inputs(8, 32))
    z.backward(inputs(8, 32))
    error = (plain.weight.grad - rounded.weight.grad).norm() / plain.weight.grad.norm()
    assert 1e-4 < error.item() < 0.15  # e5m2 has two bits


def test_decay_masks_and_flip_rates() -> None:
    training = sparsify_(Network(), "transposable", decay=0.5, mask_every=2)
    layer = training.layers["mlp.0"]
    first = layer.mask.clone()
    layer.weight.grad = torch.zeros_like(layer.weight)
    training.step()
    torch.testing.assert_close(layer.weight.grad, 0.5 * torch.where(first, 0.0, layer.weight.detach()))
    with torch.no_grad():
        layer.weight.copy_(layer.weight.roll(1, 1))
    training.step()
    assert torch.equal(layer.mask, first) and training.flip_rates == []
    training.step()
    assert torch.equal(layer.mask, keep2_transposable(layer.weight.abs()))
    moved = (layer.mask ^ first).sum().item()
    assert training.flip_rates == [moved / (layer.mask.numel() + training.layers["mlp.2"].mask.numel())]


@pytest.mark.parametrize("keep_sparse", [False, True])
def test_the_dense_end(keep_sparse: bool) -> None:
    model = Network()
    training = sparsify_(model)
    parameter = model.mlp[0].weight
    expected = training.layers["mlp.0"].projected() if keep_sparse else parameter.detach().clone()
    x = inputs(4, 16)
    sparse = model(x)
    assert training.densify_(keep_sparse=keep_sparse) is model
    assert type(model.mlp[0]) is nn.Linear and model.mlp[0].weight is parameter
    assert torch.equal(parameter, expected)
    assert torch.allclose(model(x), sparse, atol=1e-6) == keep_sparse


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", METHODS)
def test_a_network_learns(method: str, device: str) -> None:
    """On a GPU under autocast."""
    model = Network().to(device)
    training = sparsify_(model, method, mvue=True, mask_every=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = inputs(64, 16).to(device)
    target, losses = x.roll(1, 1), []
    for _ in range(150):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=device == "cuda"):
            y = model(x)
        loss = (y - target).square().mean()
        loss.backward()
        training.step()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(((p.projected().view(-1, 4) != 0).sum(1) <= 2).all() for p in training.layers.values())


def test_one_pattern_is_no_sequence_of_letters() -> None:
    """Of which `*` would match every layer, the attention's too."""
    assert list(sparsify_(Network(), layers="*mlp*").layers) == ["mlp.0", "mlp.2"]


def test_what_cannot_be_done() -> None:
    with pytest.raises(RecipeError, match=r"method 'sste' is unknown \(did you mean 's-ste'\?\)"):
        sparsify_(Network(), "sste")
    with pytest.raises(InputError, match="no linear layer is named like attn; give layers="):
        sparsify_(Network(), layers=("attn",))
    with pytest.raises(InputError, match="10 columns has no groups of four"):
        sparsify_(nn.Sequential(nn.Linear(10, 8)), layers=("*",))
