"""cLLM."""
