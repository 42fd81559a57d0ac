"""Finds the fastest settings."""
