"""The choice of the replica that gets a request.

Plain Python that sends nothing and waits for nothing.
"""
