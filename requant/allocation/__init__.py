"""What bits are worth and how a budget is spent: predicted losses of every matrix, an exact knapsack, and the share of
embedding and head."""
