"""Logits of shape (rows, vocabulary) to one token id a row: exact, vectorised, reproducible for each request."""
