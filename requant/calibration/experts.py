"""Statistics of experts, which only see the tokens that are routed to them: a few, or none.

    H_e = (sum_{t in e} x_t x_t' + tau H) / (n_e + tau),      H the mean over all experts of the layer,  tau = SHRINKAGE k

So an expert that n_e tokens reached has statistics of its own to the extent that those determine a [k, k] matrix, and
otherwise those of its layer. Means of inputs are over the expert's own tokens, means of gradients over the whole text: the
product of the two, which predicts a loss (`output_hessian.py`), thus weights an expert by how often it is used.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel

from requant import ranks
from requant.calibration.hidden_states import HiddenStateCache
from requant.models.config_checks import CHOSEN
from requant.models.experts import Experts
from requant.models.targets import QuantTarget

SHRINKAGE = 1.0  # tau, in columns of the matrix
EXPERTS_A_TOKEN = 4  # one expert of so many sees a token, where the config does not say


@torch.no_grad()
def routed_tokens(
    model: PreTrainedModel, windows: Int64[Tensor, "b t"], *, label: str | None = None
) -> dict[str, int]:
    """Path of every expert -> how many tokens of `windows` are routed to it; empty for a dense model."""
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Experts)}
    counts = {path: torch.zeros(len(layer), dtype=torch.int64) for path, layer in layers.items()}
    if not layers:
        return {}
    with ExitStack() as stack:
        for path, layer in layers.items():

            def count(_module: nn.Module, inputs: tuple[Tensor, ...], path: str = path) -> None:
                counts[path] += inputs[1].flatten().bincount(minlength=len(counts[path])).cpu()

            stack.callback(layer.register_forward_pre_hook(count).remove)
        HiddenStateCache(model, windows).run_all(label)
    own = {f"{path}.{e}": n for path, count in counts.items() for e, n in enumerate(count.tolist())}
    return {expert: sum(found[expert] for found in ranks.merged([own])) for expert in own}


def peers(model: nn.Module, targets: Sequence[QuantTarget]) -> list[list[str]]:
    """The matrices of one kind of all experts of a layer, a list each, for the layers and kinds that are among `targets`."""
    kinds = dict.fromkeys((target.experts, target.kind) for target in targets if target.experts is not None)
    layers = [(path, kind, model.get_submodule(path)) for path, kind in kinds]
    return [[f"{path}.{e}.{kind}" for e, _ in enumerate(layer.children())] for path, kind, layer in layers]


def shrunk(own: Tensor, average: Tensor, tokens: int) -> Tensor:
    """The mean over `tokens` tokens of an expert shrunk towards that over all experts; both in columns of the last size."""
    tau = SHRINKAGE * own.shape[-1]
    return (tokens * own + tau * average) / (tokens + tau)


@contextmanager
def same_routes(reference: nn.Module, model: nn.Module) -> Iterator[None]:
    """While the context lasts, tokens of `model` go to the experts that those of `reference`, called before, went to.

    The weights of experts are still the model's own for its own choice, so the outputs of a layer are not right.
    """
    chosen: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for path, layer in reference.named_modules():
            if isinstance(layer, Experts):

                def save(_module: nn.Module, inputs: tuple[Tensor, ...], path: str = path) -> None:
                    chosen[path] = inputs[1]

                def follow(
                    _module: nn.Module, inputs: tuple[Tensor, ...], path: str = path
                ) -> tuple[Tensor, ...]:
                    return inputs[0], chosen[path], inputs[2]

                stack.callback(layer.register_forward_pre_hook(save).remove)
                stack.callback(model.get_submodule(path).register_forward_pre_hook(follow).remove)
        yield


def share_of_experts(model: PreTrainedModel, targets: Sequence[QuantTarget]) -> float:
    """The fraction of a layer's experts that see a token, on average over layers where the config gives each its own."""
    layers = {target.experts for target in targets if target.experts is not None}
    config = model.config.get_text_config()
    chosen = next((count for key in CHOSEN if (count := getattr(config, key, None)) is not None), None)
    if not layers or chosen is None:
        return 1 / EXPERTS_A_TOKEN
    counts = chosen if isinstance(chosen, Sequence) else [chosen]
    most = max(sum(1 for _ in model.get_submodule(path).children()) for path in layers)
    return min(1.0, sum(counts) / len(counts) / most)
