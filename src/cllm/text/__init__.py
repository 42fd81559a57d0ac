"""Text to tokens and back: chat templates, tokenizing, detokenizing, stop strings."""
