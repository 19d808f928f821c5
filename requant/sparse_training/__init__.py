"""2:4 sparse training in your own loop: `sparsify_(model)` before, `densify_()` for a dense end, `step()` between."""

from requant.sparse_training.sparsify import SparseTraining, sparsify_

__all__ = ["SparseTraining", "sparsify_"]
