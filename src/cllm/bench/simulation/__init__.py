"""Runs the scheduler with a simulated clock."""
