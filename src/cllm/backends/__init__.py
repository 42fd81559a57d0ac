"""Backends compute logits.

``base`` is the contract; ``fake`` and ``llama_cpp`` implement it; one test checks both.
"""
