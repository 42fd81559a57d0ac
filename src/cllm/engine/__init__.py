"""The step loop, and the construction of its parts."""
