import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.formats.bits import pack_bits, unpack_bits


@settings(max_examples=60, deadline=None)
@given(bits=st.integers(1, 8), n=st.integers(1, 4), k=st.integers(1, 150), seed=st.integers(0, 2**31))
def test_bitstream_is_dense_and_little_endian(bits: int, n: int, k: int, seed: int) -> None:
    codes = torch.randint(
        0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    packed = pack_bits(codes, bits=bits)
    assert packed.shape == (n, -(-k * bits // 32)) and packed.dtype == torch.int32
    for row in range(n):
        stream = sum(int(code) << (j * bits) for j, code in enumerate(codes[row]))
        assert packed[row].numpy().tobytes() == stream.to_bytes(4 * packed.shape[1], "little")
    assert torch.equal(unpack_bits(packed, bits=bits, k=k), codes)
