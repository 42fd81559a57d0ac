"""A backend without a model, for tests and simulations."""
