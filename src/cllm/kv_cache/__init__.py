"""Bookkeeping of which sequence has which tokens in which cells.

Plain Python that never calls a backend.
"""
