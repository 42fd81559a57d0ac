"""Metrics, logs, traces and CPU times."""
