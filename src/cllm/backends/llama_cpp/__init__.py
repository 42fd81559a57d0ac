"""llama.cpp behind the backend contract. The only folder that imports llama_cpp."""
