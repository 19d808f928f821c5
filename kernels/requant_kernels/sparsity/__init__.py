"""Masks and projections of 2:4 sparsity in Triton, and products with 2:4 matrices by cuSPARSELt."""
