"""cLLM's own dialect: generate, encode, model info, health, metrics."""
