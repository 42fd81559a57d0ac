"""The commands that measure, simulate and tune."""
