"""Data types: requests, sequences, batches, outputs.

Imports no other part of cLLM except ``errors``.
"""
