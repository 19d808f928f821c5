"""Launches that take more shared memory than they need compute the same, bit for bit, also in a graph of many."""

import pytest
import torch
from requant_kernels import pack_trellis
from requant_kernels.autotune import Setting, call
from requant_kernels.launch_config import AHEAD, BYTES, GATHERED, SHARE, STAGED

from .cases import Case, random_layout, random_trellis

pytestmark = pytest.mark.gpu
GRID = Case(format="grid", bits=3, n=2500, k=4096, m=1)
RESIDUALS = Case(format="grid", bits=2, n=2500, k=4096, m=8, density=0.01)
CODES = Case(format="codebook", bits=3, n=2500, k=4096, m=8)


@pytest.mark.parametrize(
    ("case", "m", "setting"),
    [
        (GRID, 1, (8, 1, 3, 0, 128)), (GRID, 1, (8, 1, 2, BYTES, 0)),
        (GRID, 1, (16, 2, 2, BYTES, 0)), (GRID, 8, (4, 1, 3, 0, 128)), (RESIDUALS, 1, (8, 1, 1, AHEAD | STAGED, 128)),
        (RESIDUALS, 1, (8, 2, 2, BYTES, 0)),
        (RESIDUALS, 8, (4, 1, 1, GATHERED, 128)), (CODES, 8, (4, 1, 1, AHEAD, 128)),
        ("mul1", 1, (16, 2, 1, 0)), ("mul1", 8, (8, 2, 2, AHEAD)), ("pair", 1, (16, 7, 1, AHEAD)),
    ],
)  # fmt: skip
def test_room_changes_nothing(case: Case | str, m: int, setting: Setting) -> None:
    torch.manual_seed(0)
    if isinstance(case, str):
        kernel, layout = "trellis", pack_trellis(*random_trellis(2500, 4096, 2, "cuda"), bits=2, code=case)
    else:
        kernel, layout = "decode", random_layout(case, "cuda")
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    want = call(kernel, x, layout, setting)
    for shares in (1, 2):
        roomy = (*setting[:3], setting[3] + shares * SHARE, *setting[4:])
        assert torch.equal(call(kernel, x, layout, roomy), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [call(kernel, x, layout, roomy) for _ in range(5)]
        graph.replay()
        assert all(torch.equal(one, want) for one in found)
