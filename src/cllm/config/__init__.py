"""The settings: all options, the sources of their values, and files of other servers."""
