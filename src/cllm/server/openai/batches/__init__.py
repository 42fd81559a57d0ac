"""OpenAI's batches, and the files that they read and write."""
