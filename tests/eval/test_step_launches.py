"""Which launches `eval.step_launches` replaces; its times need a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from requant_kernels import TrellisLayout, pack_trellis
from requant_kernels.trellis.gemv_launch import TrellisGemvConfig, trellis_gemv
from requant_kernels.trellis.operands import RotatedActivations

from eval import step_launches
from eval.step_launches import ChosenLaunches

CPU = torch.device("cpu")


def matrix(n: int, k: int, bits: float = 3, parts: tuple[int, ...] = ()) -> TrellisLayout:
    codes = torch.zeros(n, k, dtype=torch.uint8)
    return pack_trellis(codes, torch.ones(k), torch.ones(n), bits=bits, code="mul1", parts=parts)


@pytest.mark.parametrize(
    ("layouts", "product"),
    [
        ([matrix(256, 256)], "o"),
        ([matrix(256, 768)], "down"),
        ([matrix(768, 256), matrix(768, 256, 2)], "gates"),
        ([matrix(1536, 256, parts=(768, 768))], "gates"),
        ([matrix(256, 256), matrix(64, 256), matrix(64, 256)], "qkv"),
        ([matrix(384, 256, parts=(256, 64, 64))], "qkv"),
    ],
)
def test_a_launch_belongs_to_a_product_of_the_block(layouts: list[TrellisLayout], product: str) -> None:
    assert step_launches.product_of(layouts, 256) == product


def test_only_the_chosen_product_of_so_many_sequences_is_launched_otherwise() -> None:
    chosen = ChosenLaunches(hidden=256, sequences=8, device=CPU, of={"down": (4, 2, 1, True)})
    rule = [TrellisGemvConfig()]
    assert chosen.configs([matrix(256, 256)], rule, 8, "o") == rule
    assert chosen.configs([matrix(8192, 768)], rule, 1, "down") == rule
    (found,) = chosen.configs([matrix(8192, 768)], rule, 8, "down")
    assert (found.num_warps, found.tiles_per_cta, found.units_per_step) == (4, 2, 1)
    assert found.max_ctas_per_sm == 2  # 256 CTAs on 132 SMs


def test_kernels_get_the_chosen_launch_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gemv: Any = pytest.importorskip("requant_kernels.trellis.gemv")
    seen: list[Any] = []
    monkeypatch.setattr(gemv, "product", lambda x, layout, config: seen.append(config))
    layout, x = matrix(256, 768), torch.zeros(8, 768)
    rule: Any = trellis_gemv(step_launches.Shape("mul1", 3, 256, 768, 8), CPU)
    with ChosenLaunches(hidden=256, sequences=8, device=CPU, of={"down": (2, 4, 1, False)}).applied():
        gemv.product(x, layout, rule)
    gemv.product(x, layout, rule)
    assert [config.num_warps for config in seen] == [2, rule.num_warps]


def test_a_head_gets_the_chosen_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = pytest.importorskip("requant_kernels.trellis.gemv_group")
    from requant.inference import trellis_ends

    seen: list[Any] = []
    monkeypatch.setattr(group, "multiply_bands", lambda y, layouts, configs, dtype: seen.append(configs))
    y = RotatedActivations(values=torch.zeros(1, 256), scales=None)
    rule = [TrellisGemvConfig(), TrellisGemvConfig()]
    for of in ({"head": (2, 4, 1, False)}, {"down": (2, 4, 1, False)}):
        with ChosenLaunches(hidden=256, sequences=1, device=CPU, of=of).applied():
            trellis_ends.multiply_bands(y, [matrix(512, 256), matrix(512, 256)], rule, torch.float16)
    assert [config.num_warps for config in seen[0]] == [2, 2] and seen[1] == rule


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"format": "mul1:5"}, "mul1:5 must be"),
        ({"format": "mul1"}, "mul1 must be"),
        ({"format": "grid:2"}, "grid:2 must be"),
        ({"shape": "8b"}, "8b and mul1:3"),
        ({"product": ["q"]}, "q is not a product; give qkv"),
    ],
)
def test_other_values_are_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(typer.BadParameter, match=why):
        step_launches.main(tmp_path / "out.json", **options)
