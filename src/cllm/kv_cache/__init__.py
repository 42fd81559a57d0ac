"""Who holds which tokens where: bookkeeping in plain Python that never calls a backend."""
