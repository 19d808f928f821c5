"""The statistics of a list of linears, by one pass over the text a kind: see `calibration.LinearStats`."""

from collections.abc import Sequence

from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from requant.calibration.fisher import position_fisher
from requant.calibration.hessian import InputStatistics, input_statistics
from requant.calibration.output_hessian import output_hessians
from requant.calibration.stats import LinearStats
from requant.calibration.stream import Stream
from requant.models.targets import LinearSite

# by forward passes; the others take a backward pass each
OF_INPUTS = frozenset({"hessian", "input_mean_abs"})


def collect(
    model: PreTrainedModel,
    windows: Int64[Tensor, "b t"],
    sites: Sequence[LinearSite],
    *,
    needs: frozenset[str],
    stream: Stream | None = None,
    reference: Stream | None = None,
    label: str | None = None,
) -> dict[str, LinearStats]:
    """The fields named in `needs` for every site, by the site's name; with a `reference`, `cross_hessian` beside them.

    Only statistics of inputs go on from `stream`: see `input_statistics`.
    """
    inputs: dict[str, InputStatistics] = {}
    if needs & OF_INPUTS:
        inputs = input_statistics(model, windows, sites, stream=stream, reference=reference, label=label)
    fisher = position_fisher(model, windows, sites, label=label) if "fisher" in needs else {}
    outputs = output_hessians(model, windows, sites, label=label) if "output_hessian" in needs else {}
    return {
        site.name: LinearStats(
            hessian=inputs[site.name].hessian if "hessian" in needs else None,
            cross_hessian=inputs[site.name].cross if "hessian" in needs else None,
            input_mean_abs=inputs[site.name].mean_abs if "input_mean_abs" in needs else None,
            fisher=fisher.get(site.name),
            output_hessian=outputs.get(site.name),
            tokens=windows.numel(),
        )
        for site in sites
    }


def bytes_needed(site: LinearSite, needs: frozenset[str]) -> int:
    """Float32 bytes that `collect` holds for one site (siblings that share an input share its Hessian)."""
    n, k = site.shape
    floats = {"fisher": n * k, "hessian": k * k, "output_hessian": n * n, "input_mean_abs": k}
    return 4 * sum(floats[field] for field in needs)
