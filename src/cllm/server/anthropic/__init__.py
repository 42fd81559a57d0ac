"""Anthropic's dialect: messages, count_tokens, models."""
