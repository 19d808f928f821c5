"""What a run writes for its user: checkpoint folder, report, model card, comparisons of checkpoints; and the two public
calls that are runs for such a result alone, scores on disk and sweeps."""
