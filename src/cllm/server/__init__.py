"""HTTP. One folder a dialect; no tokens and no llama.cpp here, only wire formats over the service."""
