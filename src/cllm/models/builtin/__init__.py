"""The built-in model: a few megabytes of weights that answer questions a program can check."""
