"""Conversion between text and tokens: chat templates, tool formats, grammars, detokenizing, stop
strings.
"""
