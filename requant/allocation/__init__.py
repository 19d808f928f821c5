"""Allocation of a byte budget: the predicted loss of every matrix at every bit width, an exact knapsack over them, and
embedding and head."""
