"""OpenAI's dialect: chat completions, completions, responses, embeddings, files, batches,
models.
"""
