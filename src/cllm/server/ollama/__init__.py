"""Ollama's dialect: generate, chat, embed, and what it tells of models."""
