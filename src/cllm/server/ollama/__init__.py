"""Ollama's dialect: generate, chat, embed, and routes about models."""
