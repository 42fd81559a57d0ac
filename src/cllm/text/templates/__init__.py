"""Renders conversations with a model's chat template, and adapts those that it rejects or cuts."""
