"""Answer questions from documents: embed them once, find the nearest, rank them, and ask.

    python examples/rag.py
    MODEL=hf:Qwen/Qwen3-4B-GGUF:Q4_K_M EMBEDDING_MODEL=hf:Qwen/Qwen3-Embedding-0.6B-GGUF:Q8_0 \\
        RERANKER=hf:gpustack/bge-reranker-v2-m3-GGUF:Q8_0 python examples/rag.py

Without these variables the built-in model does all three, which shows the steps, not the quality.
"""

import os

import numpy as np

from cllm import LLM, SamplingParams

DOCUMENTS = [
    "Oslo is the capital of Norway.",
    "Paris is the capital of France.",
    "The colour of a banana is yellow.",
    "The colour of snow is white.",
    "The day after Thursday is Friday.",
]
NUM_NEAR, NUM_READ = 3, 1


class Library:
    """Documents with their vectors."""

    def __init__(self, documents: list[str], embedder: LLM, ranker: LLM) -> None:
        self.documents, self.embedder, self.ranker = documents, embedder, ranker
        self.vectors = embedder.embed(documents)  # shape (documents, embedding_size), length 1

    def find(self, question: str) -> list[str]:
        """Return the documents that fit best: the nearest vectors, in the order of the ranker."""
        [asked] = self.embedder.embed(question)
        nearest = np.argsort(-(self.vectors @ asked))[:NUM_NEAR]
        near = [self.documents[i] for i in nearest]
        return [ranked.document for ranked in self.ranker.rerank(question, near, NUM_READ)]


def answer(llm: LLM, question: str, documents: list[str]) -> str:
    """Return an answer from ``documents``."""
    sources = "\n".join(documents)
    messages = [{"role": "user", "content": f"{sources}\n{question}"}]
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=200)).text


def main() -> None:
    with LLM(os.environ.get("MODEL"), model_max_context_length=2048) as llm:
        named = [os.environ.get(name) for name in ("EMBEDDING_MODEL", "RERANKER")]
        embedder, ranker = (LLM(name) if name else llm for name in named)
        library = Library(DOCUMENTS, embedder, ranker)
        for question in ("What is the capital of Norway?", "What colour is a banana?"):
            found = library.find(question)
            print(question, "->", answer(llm, question, found))
            print("   from:", *found)


if __name__ == "__main__":
    main()
