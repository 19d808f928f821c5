"""What a run writes for its user: checkpoint folder, report, model card, scores on disk, comparisons of checkpoints."""
