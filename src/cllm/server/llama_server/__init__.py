"""Routes of llama-server and vLLM that OpenAI's API does not have."""
