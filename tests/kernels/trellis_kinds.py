"""Codes and bits that the tests of the trellis GEMM go through."""

KINDS = [
    ("mul1", 1), ("mul1", 2), ("mul1", 2.25), ("mul1", 3), ("mul1", 3.5), ("mul1", 4), ("mul1", 8), ("pair", 1),
    ("pair", 2), ("pair", 2.25), ("pair", 4), ("3inst", 2), ("3inst", 3.25),
]  # fmt: skip
INT8 = [("mul1", 1), ("mul1", 2), ("mul1", 2.25), ("mul1", 3), ("pair", 2), ("pair", 2.25)]
