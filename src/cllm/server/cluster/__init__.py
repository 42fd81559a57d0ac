"""What a server offers to the fronts of its cluster, under /internal/."""
