"""Writes JSON schemas as grammar rules."""
