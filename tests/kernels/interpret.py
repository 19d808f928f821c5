"""Run under TRITON_INTERPRET=1 by `test_interpreter.py`: every kernel, without assembly, against its twin."""

import math

import interpreter_fixes  # noqa: F401
import torch
from case_selection import selected
from cases import Case, poisoned_empty, random_csr, random_layout, random_trellis, relative_error, rotated
from requant_kernels import GridLayout, pack_trellis
from requant_kernels.experts.router import choose_experts
from requant_kernels.fallback import reference
from requant_kernels.hadamard.transform import hadamard_transform, hadamard_transform_int8
from requant_kernels.scalar.dequantize import dequantize
from requant_kernels.scalar.embedding import lookup
from requant_kernels.scalar.gemm import gemm
from requant_kernels.scalar.gemm_launch import GemmConfig
from requant_kernels.scalar.gemv import gemv
from requant_kernels.scalar.gemv_launch import GemvConfig
from requant_kernels.scalar.permute import permute_activations
from requant_kernels.scalar.splitk_reduce import splitk_reduce
from requant_kernels.step import attention
from requant_kernels.step.choose import choose_tokens
from requant_kernels.step.embed import embed
from requant_kernels.trellis.dequantize import dequantize as dequantize_trellis
from requant_kernels.trellis.dequantize import matmul as trellis_dense
from requant_kernels.trellis.gemm_int8 import quantized
from requant_kernels.trellis.lookup import lookup as lookup_trellis

CASES = [
    (Case(format="codebook", bits=3, n=37, k=300, m=1), GemvConfig(num_warps=2)),
    (Case(format="grid", bits=2, n=37, k=600, m=3, density=0.02), GemvConfig(num_warps=2, tiles_per_cta=2)),
    (Case(format="grid", bits=3, n=20, k=1100, m=1, zero_points=True, bias=True), GemvConfig(num_warps=2, num_stages=2)),
    (Case(format="grid", bits=2, n=37, k=600, m=1, density=0.05, int8_residuals=True), GemvConfig(num_warps=2)),
    (
        Case(format="grid", bits=3, n=20, k=1100, m=1, group_size=64, zero_points=True, bias=True),
        GemvConfig(num_warps=2, num_stages=2, tiles_per_cta=2),
    ),
    (
        Case(format="grid", bits=4, n=33, k=768, m=1, group_size=768),
        GemvConfig(num_warps=1, num_stages=3, prefetch=False),
    ),
    (
        Case(format="grid", bits=5, n=33, k=700, m=9, group_size=700, zero_points=True, density=0.01, int8_residuals=True),
        GemvConfig(num_warps=2),
    ),
    (Case(format="grid", bits=8, n=16, k=301, m=1, group_size=64, column_scales=True), GemvConfig(num_warps=2)),
    (Case(format="codebook", bits=6, n=16, k=300, m=2, density=0.1), GemvConfig(num_warps=2)),
    (Case(format="grid", bits=4, n=16, k=900, m=2, group_size=512, zero_points=True), GemvConfig(num_warps=2)),
    (Case(format="grid", bits=4, n=140, k=600, m=17, group_size=600, zero_points=True, density=0.02, bias=True), None),
    (Case(format="codebook", bits=2, n=40, k=300, m=20, column_scales=True), None),
    (Case(format="grid", bits=3, n=20, k=300, m=18, group_size=32, zero_points=True, bias=True), None),
    (Case(format="grid", bits=2, n=20, k=300, m=18, group_size=64), None),
]  # fmt: skip
TRELLISES = [
    ("mul1", 2, 30, 200, 1, 0.02),
    ("pair", 2, 16, 96, 3, 0.0),
    ("3inst", 3, 16, 64, 17, 0.05),
    ("mul1", 2.25, 16, 300, 1, 0.0),
    ("mul1", 3.5, 16, 80, 2, 0.0),
    ("pair", 2.25, 16, 300, 1, 0.0),
    ("mul1", 7, 16, 80, 2, 0.0),
]


def check_int8(width: int, pair: bool) -> None:
    """Rotated activations as high and low bytes, with the sums of their integers."""
    x, input_scales = torch.randn(2, width).half(), torch.rand(width).half()
    x[1] = 0
    padded, held = -(-width // 16) * 16, -(-width // 64) * 64
    y, scales = hadamard_transform_int8(
        x, input_scales, in_width=width, out_width=held, pair=pair, asm=False, pdl=False
    )
    bytes_of = y.view(2, 2, held).long()
    q = 256 * bytes_of[:, 0] + bytes_of[:, 1]
    assert torch.equal(q.sum(1).float(), scales[:, 0, 1])
    want = rotated(torch.nn.functional.pad(x.double() * input_scales, (0, padded - width)))
    if pair:
        want = torch.stack([want[:, ::2] + want[:, 1::2], want[:, ::2] - want[:, 1::2]], -1).flatten(1)
    error = relative_error((q * scales[:, :, 0].double())[:, :padded], want)
    assert error < 5e-5, f"int8 of {width} is off by {error:.1e}"
    assert not q[1].any() and not q[:, padded:].any()


def check_one_scale_a_token() -> None:
    """Activations in int8 as the trellis GEMM reads them, from rotated ones in either order."""
    for columns, permuted in ((192, True), (208, False), (4096, False)):
        x = torch.randn(4, columns).half()
        x[1], x[2] = 0, -x[2].abs()
        given = x.view(4, -1, 4, 8, 2).transpose(2, 3).reshape(4, columns) if permuted else x
        q, scales = quantized(given.contiguous(), permuted=permuted, pdl=False)
        width = -(-columns // 64) * 64
        assert q.shape == (4, width) and torch.equal(scales, x.abs().amax(1).float() / 127)
        want = torch.nn.functional.pad(x.float(), (0, width - columns))
        want = want.view(4, -1, 4, 4, 4).transpose(2, 3).reshape(4, width)  # t q e -> q t e
        assert ((q * scales[:, None] - want).abs() <= scales[:, None] * 0.5001).all()
        assert q[:1].abs().max() == 127
        x[0, 3], x[3, 5] = torch.inf, torch.nan
        assert quantized(x, permuted=False, pdl=False)[1].isnan().tolist() == [True, False, False, True]


def check_unrotated() -> None:
    """A trellis without one rotation or both, and activations that are only quantized."""
    for code, n, k, m, rotates in (
        ("mul1", 30, 208, 2, (False, False)), ("pair", 32, 300, 17, (True, False)), ("3inst", 37, 48, 3, (False, True)),
    ):  # fmt: skip
        codes, input_scales, output_scales = random_trellis(n, k, 2, "cpu")
        layout = pack_trellis(
            codes, input_scales if rotates[0] else None, output_scales, bits=2, code=code, rotates_output=rotates[1],
            sparse=random_csr(n, k, 0.02, False, "cpu"),
        )  # fmt: skip
        x, bias = torch.randn(m, k).half(), torch.randn(n).half()
        error = relative_error(trellis_dense(x, layout, bias, asm=False), reference.linear(x, layout, bias))
        assert error < 3e-3, f"trellis {code}, rotating {rotates}, is off by {error:.1e}"
    x = torch.randn(2, 200).half()
    for pair in (False, True):
        y, scales = hadamard_transform_int8(
            x, None, in_width=200, out_width=256, pair=pair, asm=False, pdl=False, rotate=False
        )
        q = 256 * y.view(2, 2, 256)[:, 0].double() + y.view(2, 2, 256)[:, 1]
        want = x.double()
        if pair:
            want = torch.stack([want[:, ::2] + want[:, 1::2], want[:, ::2] - want[:, 1::2]], -1).flatten(1)
        assert relative_error((q * scales[:, :, 0].double())[:, :200], want) < 5e-5
        assert torch.equal(q.sum(1).float(), scales[:, 0, 1]) and not q[:, 200:].any()


def check_rows() -> None:
    """Rows of a trellis whose output is not rotated, of several columns; a token outside of it gets row 0."""
    for code, bits, n, k, rotates in selected([
        ("mul1", 2, 37, 300, True), ("pair", 2, 37, 208, False), ("pair", 2.25, 30, 200, True), ("3inst", 3, 16, 64, True),
        ("mul1", 3.5, 48, 80, False), ("mul1", 1, 20, 530, True), ("pair", 1.75, 33, 272, True),
    ]):  # fmt: skip
        codes, input_scales, output_scales = random_trellis(n, k, bits, "cpu")
        layout = pack_trellis(
            codes, input_scales if rotates else None, output_scales, bits=bits, code=code, rotates_output=False,
        )  # fmt: skip
        tokens = torch.tensor([n - 1, 0, 15, 7, 8, 7, n, -1], dtype=torch.int32)
        want = reference.weight(layout)[tokens.where((tokens >= 0) & (tokens < n), 0)]
        for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
            error = relative_error(lookup_trellis(tokens, [layout], dtype), want)
            assert error < limit, f"rows of {code} at {bits} bits are off by {error:.1e}"


def check_rows_of_bands() -> None:
    """Of the band that a token belongs to, whose bits and units are its own."""
    k, sizes, widths = 200, (16, 32, 21), (4, 2.25, 1.5)
    input_scales = random_trellis(16, k, 2, "cpu")[1]
    layouts = []
    for n, bits in zip(sizes, widths, strict=True):
        codes, _, output_scales = random_trellis(n, k, bits, "cpu")
        layouts.append(
            pack_trellis(codes, input_scales, output_scales, bits=bits, code="mul1", rotates_output=False)
        )
    whole = torch.cat([reference.weight(layout) for layout in layouts])
    tokens = torch.tensor([0, 15, 16, 47, 48, 68, 20, 69, -1])
    want = whole[tokens.where((tokens >= 0) & (tokens < 69), 0)]
    error = relative_error(lookup_trellis(tokens, layouts, torch.float32), want)
    assert error < 1e-6, f"rows of bands are off by {error:.1e}"


def check_joined() -> None:
    """Matrices of one rotation of the input, each with one of its own for the output: q, k and v, gate and up."""
    for parts, m, density in (((64, 16, 16), 2, 0.0), ((48, 48), 3, 0.02), ((16, 48, 48, 32), 20, 0.02)):
        n, k = sum(parts), 96
        layout = pack_trellis(
            *random_trellis(n, k, 2, "cpu"), bits=2, code="mul1", parts=parts,
            sparse=random_csr(n, k, density, False, "cpu") if density else None,
        )  # fmt: skip
        x, bias = torch.randn(m, k).half(), torch.randn(n).half()
        error = relative_error(trellis_dense(x, layout, bias, asm=False), reference.linear(x, layout, bias))
        assert error < 3e-3, f"matrices of {parts} rows, joined, are off by {error:.1e}"


def check_permute_and_reduce() -> None:
    """Activations in the order of the packed codes, and partial products added in the order of the rows."""
    for m, k, n in ((13, 301, 30), (9, 300, 48), (3, 512, 700)):
        x = torch.randn(m, k).half()
        row_perm = torch.nn.functional.pad(torch.randperm(n).int(), (0, -n % 16), value=n)
        permuted, inverse_perm = permute_activations(x, 2, row_perm, n, pdl=False)
        want = torch.nn.functional.pad(x, (0, 512 - k)).view(m, 16, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5)
        assert inverse_perm is not None and torch.equal(permuted, want.reshape(m, 512))
        partial, bias, y = (
            torch.randn(3, len(row_perm), 64),
            torch.randn(n).half(),
            torch.full((m, n), torch.nan).half(),
        )
        splitk_reduce(partial, inverse_perm, bias, y, pdl=False)
        want = torch.empty(m, n)
        want[:, row_perm[:n].long()] = partial.sum(0)[:n, :m].T
        assert relative_error(y, (want + bias).double()) < 1e-3


def check_attention() -> None:
    """In one part and in several, of one block and of more; with a mask, or a position behind which nothing is read."""
    q, k, v = (torch.randn(2, h, n, 24).half() for h, n in ((6, 1), (2, 150), (2, 150)))
    at, sms = torch.arange(150).expand(2, -1), attention.num_sms
    for parts, most in selected(((1, 2), (2, 4), (-(-150 // attention.BLOCK), 264))):
        attention.num_sms = lambda _, most=most: most
        assert attention.num_parts(4, 150, most) == parts
        for mask in (None, at < torch.tensor([[70], [1]])):
            error = attention_error(q, k, v, mask, attention.attend(q, k, v, mask, 0.2))
            assert error < 2e-3, f"attention in {parts} parts is off by {error:.1e}"
        for position in selected((0, 63, 64, 100, 150, 149)):
            visible = at <= position
            keys, values = (x.masked_fill(~visible[:, None, :, None], torch.nan) for x in (k, v))
            y = attention.attend(q, keys, values, None, 0.2, position=torch.tensor(position))
            error = attention_error(q, k, v, visible, y)
            assert error < 2e-3, f"attention in {parts} parts is off by {error:.1e} at {position}"
    attention.num_sms = sms
    for length in (
        60,
        150,
        attention.split_block(24) * attention.SPLITS[-1] + 40,
    ):  # of one block, or of several
        k, v = (torch.randn(1, 2, length, 24).half() for _ in range(2))
        for position in (0, 59, length - 1):
            visible = torch.arange(length)[None] <= position
            keys, values = (x.masked_fill(~visible[:, None, :, None], torch.nan) for x in (k, v))
            found = attention.attend_split(q[:1], keys, values, 0.2, position=torch.tensor(position))
            assert found.values.shape[1] in attention.SPLITS
            weights = torch.softmax(found.logarithms.double() * math.log(2), 1)
            y = (found.values.double() * weights[:, :, None]).sum(1)[None, None]
            error = attention_error(q[:1], k, v, visible, y)
            assert error < 2e-3, f"split attention of {length} is off by {error:.1e} at {position}"


def attention_error(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, y: torch.Tensor
) -> float:
    return relative_error(y, torch.ops.requant.attend(q, k, v, mask, 0.2).double())


def check_ends() -> None:
    """Tokens as torch.argmax chooses them: the first of equal ones, zeros of both signs are, and NaN is the largest."""
    for dtype, v in ((torch.float16, 5000), (torch.float32, 7), (torch.float16, 2048)):
        logits = torch.randn(6, v + 3, dtype=dtype)[:, 3:]
        logits[1], logits[2], logits[3] = -torch.inf, 0, logits[3].round()
        logits[2, ::3], logits[4, v // 3 :], logits[4, v // 2] = -0.0, torch.nan, -torch.nan
        kept, tokens, length = torch.empty(6, v, dtype=dtype), torch.zeros(6, 1).long(), torch.tensor(4)
        choose_tokens(logits, kept, tokens, length)
        assert torch.equal(tokens, logits.argmax(-1, keepdim=True)), f"tokens of {v}"
        assert torch.equal(kept.view(torch.uint8), logits.contiguous().view(torch.uint8))
        assert int(length) == 5
    table, cos, sin = torch.randn(50, 1500).half(), torch.randn(9, 24), torch.randn(9, 24)
    for position in (0, 8, 9):
        x, cosines, sines = embed(torch.tensor([[3], [49], [50]]), table, cos, sin, torch.tensor(position))
        row = min(position, 8)
        assert torch.equal(x, table[[3, 49, 0]])
        assert torch.equal(cosines[0], cos[row]) and torch.equal(sines[0], sin[row])


def check_permuted() -> None:
    """Blocks of 16 to 1024 values: the sum of splits is transformed, and written in the order of `trellis/gemm_sm90.py`."""
    for width in (48, 208, 1024):
        out_width, splits = -(-width // 64) * 64, torch.randn(3, 5, width)
        plain, whole, permuted = (torch.empty(5, out_width) for _ in range(3))
        hadamard_transform(
            splits, plain, in_width=width, columns=width, out_width=out_width, asm=False, pdl=False
        )
        hadamard_transform(
            splits.sum(0), whole, in_width=width, columns=width, out_width=out_width, asm=False, pdl=False
        )
        hadamard_transform(
            splits, permuted, in_width=width, columns=width, out_width=out_width, asm=False, pdl=False, permute=True
        )  # fmt: skip
        assert relative_error(plain, whole.double()) < 1e-6
        assert torch.equal(permuted, plain.view(5, -1, 4, 8, 2).transpose(2, 3).reshape(5, out_width))
        hadamard_transform(
            splits, permuted, in_width=width, columns=width, out_width=out_width, asm=False, pdl=False, pair=True,
            permute=True,
        )  # fmt: skip
        even, odd = plain[:, ::2], plain[:, 1::2]
        sums = torch.stack([even + odd, even - odd], -1).flatten(1)
        want = sums.view(5, -1, 4, 8, 2).transpose(2, 3).reshape(5, out_width)
        assert relative_error(permuted, want.double()) < 1e-6


def check_router() -> None:
    """Experts and weights as torch's: softmax, top k, and normalized; of equal logits the first; a number that is none."""
    for m, k, experts, chosen, normalized in (
        (3, 200, 128, 8, True),
        (1, 64, 60, 4, False),
        (2, 48, 8, 1, True),
    ):
        y, weight = torch.randn(m, k).half(), torch.randn(experts, k).half()
        found, weights = choose_experts(y, weight, chosen, normalized=normalized)
        logits = (y.float() @ weight.float().T).half().float()
        wanted, indices = logits.softmax(-1).topk(chosen)
        assert torch.equal(found.long(), indices)
        wanted = wanted / wanted.sum(-1, keepdim=True) if normalized else wanted
        assert relative_error(weights, wanted.double()) < 1e-3
    found, _ = choose_experts(torch.ones(1, 16).half(), torch.ones(20, 16).half(), 3, normalized=True)
    assert found.tolist() == [[0, 1, 2]]
    found, _ = choose_experts(
        torch.full((1, 16), math.nan).half(), torch.ones(20, 16).half(), 3, normalized=True
    )
    assert found.min() >= 0 and found.max() < 20


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.empty = poisoned_empty
    check_attention()
    check_ends()
    for width in (2048, 6144):
        x, input_scales = torch.randn(2, width).half(), torch.rand(width).half()
        y = torch.empty_like(x)
        hadamard_transform(
            x,
            y,
            in_width=width,
            columns=width,
            out_width=width,
            asm=False,
            pdl=False,
            input_scales=input_scales,
        )
        error = relative_error(y, rotated(x.double() * input_scales.double()))
        assert error < 1e-3, f"the transform of {width} is off by {error:.1e}"
    for width, pair in ((200, False), (1408, True), (4096, False)):
        check_int8(width, pair)
    check_one_scale_a_token()
    check_permute_and_reduce()
    for case, config in selected(CASES):
        layout = random_layout(case, "cpu")
        x = torch.randn(case.m, case.k + case.bias).half()[:, case.bias :]  # some begin between two pairs
        bias = torch.randn(case.n).half() if case.bias else None
        if config is None:
            y = gemm(x, layout, bias, GemmConfig(num_warps=4, split_k=2), asm=False)
        else:
            y = gemv(x, layout, bias, config, asm=False)
        error = relative_error(y, reference.linear(x, layout, bias))
        assert error < 3e-3, f"{case}: linear is off by {error:.1e}"
        error = relative_error(dequantize(layout, torch.float16, asm=False), reference.weight(layout))
        assert error < 2e-3, f"{case}: dequantize is off by {error:.1e}"
    grid = random_layout(
        Case(format="grid", bits=5, n=37, k=300, m=1, group_size=64, zero_points=True, column_scales=True),
        "cpu",
    )
    assert isinstance(grid, GridLayout)
    tokens = torch.tensor([0, 36, 8, 17])
    error = relative_error(lookup(tokens, grid, torch.float16), reference.weight(grid)[tokens])
    assert error < 2e-3, f"rows are off by {error:.1e}"
    for code, bits, n, k, m, density in selected(TRELLISES):
        sparse = random_csr(n, k, density, m > 1, "cpu") if density else None
        layout = pack_trellis(*random_trellis(n, k, bits, "cpu"), bits=bits, code=code, sparse=sparse)
        x, bias = torch.randn(m, k).half(), torch.randn(n).half()
        want = reference.linear(x, layout, bias)
        error = relative_error(trellis_dense(x, layout, bias, asm=False), want)
        assert error < 3e-3, f"trellis {code} at {bits} bits is off by {error:.1e}"
        assert torch.equal(dequantize_trellis(layout, asm=False).double(), reference.trellis_values(layout))
    check_router()
    check_permuted()
    check_unrotated()
    check_rows()
    check_rows_of_bands()
    check_joined()


if __name__ == "__main__":
    main()
