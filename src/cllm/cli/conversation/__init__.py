"""Conversations in the terminal."""
