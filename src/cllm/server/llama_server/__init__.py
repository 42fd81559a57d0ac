"""Routes of llama-server and vLLM beside OpenAI's."""
