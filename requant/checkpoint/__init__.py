"""The checkpoint: a Hugging Face folder with packed matrices. format.md is its specification."""

from requant.checkpoint.layout import MatrixLayout
from requant.checkpoint.load import load, load_weights, verify_checksums
from requant.checkpoint.save import check_output, save_checkpoint
from requant.checkpoint.sizes import ByteTable, MatrixBytes, byte_table, matrix_parts
from requant.checkpoint.validate import FORMAT_VERSION, CheckpointHeader, read_header

__all__ = [
    "FORMAT_VERSION",
    "check_output",
    "save_checkpoint",
    "read_header",
    "load",
    "load_weights",
    "verify_checksums",
    "byte_table",
    "matrix_parts",
    "ByteTable",
    "CheckpointHeader",
    "MatrixBytes",
    "MatrixLayout",
]
