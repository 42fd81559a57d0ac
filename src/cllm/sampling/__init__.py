"""Turns logits of shape (rows, vocabulary) into one token id per row: exact, vectorised,
reproducible per request.
"""
