"""2:4 sparsity on plain tensors: masks, projections, and the random pruning of gradients."""
