"""Masks and projections of 2:4 sparsity in Triton."""
