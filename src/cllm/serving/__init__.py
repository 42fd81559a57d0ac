"""Models under their names, and neutral requests to them. No HTTP."""
