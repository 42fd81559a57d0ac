"""The border between the API process and the engine process: messages, the child, and the client
that watches it.
"""
