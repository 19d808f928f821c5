"""What a run says about itself, beside its checkpoint: pages, plots, the model card, checkpoints side by side."""
