"""Compiling the kernels of a checkpoint while its weights are being read.

Which kernels multiply a matrix follows from its format, width and shape, which config.json has. So before any weight is
read, zeros of the same specs are laid out, one matrix of every kind, and other processes compile whatever its check
(`kernel_check.py`) is going to launch. The checks wait for what is not ready by then, and compile what was guessed
wrongly.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from requant_kernels import Layout, TrellisLayout
from requant_kernels.ops import multiply

from requant.formats.packed_spec import PackedSpec
from requant.formats.quantized_weight import QuantizedWeight, bands_of, join_rows, unpack
from requant.inference.convert import joinable, kernel_layout
from requant.inference.kernel_check import TOKENS, kind_of
from requant.models.targets import SIBLINGS

OF_AN_EXPERT = ".experts."  # in the name of its parent: a matrix that stays by itself


def compile_while_loading(
    specs: Mapping[str, PackedSpec], *, device: torch.device, dtype: torch.dtype
) -> None:
    """Begin to compile what the checks of matrices with these names launch for activations of `dtype`, and return."""
    from requant_kernels.common.compile_ahead import compile_ahead

    def checks() -> (
        None
    ):  # with the layouts: where memory is too short for them, loading goes on and says so itself
        layouts = {kind_of(layout): layout for layout in expected_layouts(specs, device)}
        for layout in layouts.values():
            for tokens in TOKENS:
                multiply(torch.empty(tokens, layout.k, dtype=dtype, device=device), layout, None)

    compile_ahead(checks, wait=False)


def expected_layouts(
    specs: Mapping[str, PackedSpec], device: torch.device
) -> Iterator[Layout | TrellisLayout]:
    """The layouts that `convert.py` will make, each combination of specs once.

    Matrices with residuals are left out: no spec says where their residuals lie.
    """
    seen = set()
    for names in siblings(specs):
        own = tuple(specs[name] for name in names)
        if own in seen or any(spec.sparse is not None for spec in own):
            continue
        seen.add(own)
        weights = {name: zeros(specs[name], device) for name in names}
        for group in joinable(weights):
            try:
                weight = join_rows([weights[name] for name in group])
                if weight is not None:
                    yield from map(kernel_layout, bands_of(weight))
            except ValueError:  # no kernel takes it
                continue


def siblings(names: Iterable[str]) -> Iterator[list[str]]:
    """Names of matrices that read the same activations; most are alone."""
    leaves: dict[str, list[str]] = defaultdict(list)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        leaves[parent].append(leaf)
    for parent, own in leaves.items():
        alone = [(leaf,) for leaf in own]
        for group in alone if OF_AN_EXPERT in f".{parent}." else (*SIBLINGS, *alone):
            found = [leaf for leaf in group if leaf in own]
            own[:] = [leaf for leaf in own if leaf not in found]
            if found:
                yield [f"{parent}.{leaf}" if parent else leaf for leaf in found]


def zeros(spec: PackedSpec, device: torch.device) -> QuantizedWeight:
    """A matrix of a spec."""
    stored = spec.tensors().items()
    return unpack(
        spec, {suffix: torch.zeros(each.shape, dtype=each.dtype, device=device) for suffix, each in stored}
    )
