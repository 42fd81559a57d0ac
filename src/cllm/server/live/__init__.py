"""The live view: what the server computes now, as a stream of snapshots."""
