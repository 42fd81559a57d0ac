"""HTTP, one folder for each dialect.

It only translates wire formats for the service, and does not use llama.cpp.
"""
