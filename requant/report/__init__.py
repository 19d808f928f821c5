"""The edges that write: saving a run with its report and model card, scores on disk, and comparisons of checkpoints."""
