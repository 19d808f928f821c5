"""Kernels of training: the divergence of two models' logits with its gradient, and a step of Adam."""
