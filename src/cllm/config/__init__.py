"""The settings: what exists, where values come from, and files of other servers."""
