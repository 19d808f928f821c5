"""What a model is worth: perplexity and KL, lm-eval tasks, models side by side, tokens a second, samples of text."""
