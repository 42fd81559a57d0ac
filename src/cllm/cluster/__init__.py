"""The front of a cluster: one address for many servers, its replicas."""
