"""Measuring models: perplexity and KL to the original, predicted against measured loss, lm-eval tasks, text samples,
tokens per second."""
