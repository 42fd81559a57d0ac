"""How model families write tool calls, and how calls are read and constrained."""
