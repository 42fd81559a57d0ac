"""Compares cLLM with other servers."""
