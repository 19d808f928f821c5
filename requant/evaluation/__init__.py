"""Measuring models: perplexity and KL to the original, lm-eval tasks, text samples, tokens per second."""
