"""Renders conversations with a model's chat template, and adapts what it refuses or omits."""
