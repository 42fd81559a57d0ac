"""The nouns: what is asked, what is computed, what one step does. Imports nothing else of cLLM but errors."""
