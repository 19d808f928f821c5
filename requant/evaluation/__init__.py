"""Measuring models: perplexity and KL to the original, lm-eval tasks, samples of text, tokens a second."""
