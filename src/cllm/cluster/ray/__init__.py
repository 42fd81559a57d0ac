"""Places replicas with Ray Serve: each one is an actor that owns a ``cllm serve`` process.

No request passes through Ray. Only this folder imports Ray, the extra ``cluster``.
"""
