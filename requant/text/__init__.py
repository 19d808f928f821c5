"""Text: where it comes from, how it is cut into windows of tokens, and sampling of new tokens."""
