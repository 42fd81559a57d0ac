"""A model in the caller's process, without a server."""
