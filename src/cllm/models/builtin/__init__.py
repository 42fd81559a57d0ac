"""The built-in model: a few megabytes of weights for questions whose answers a program can
check.
"""
