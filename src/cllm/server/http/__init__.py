"""HTTP itself: connections, the protocol, streams of events."""
