"""The step loop and the place where its parts are put together."""
