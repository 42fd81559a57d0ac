"""What computes logits. ``base`` is the contract; ``fake`` and ``llama_cpp`` keep it, and one test checks both."""
