"""Write a query and a document as one text in the form on which a reranker was trained, and read
the scores of documents.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

from cllm.core.model_info import ModelInfo
from cllm.core.segments import Segment
from cllm.core.vocabulary import VocabularyFacts
from cllm.text.templates.fences import Fences

if TYPE_CHECKING:  # most servers rank nothing, and NumPy takes time and memory
    import numpy as np
    import numpy.typing as npt

PLACES = re.compile(r"(\{query\}|\{document\})")


class PairFormat:
    """``split`` returns texts to tokenize, and ``join`` makes the pairs of their token ids."""

    def __init__(self, vocabulary: VocabularyFacts, fences: Fences) -> None:
        self._vocabulary = vocabulary
        self._fences = fences

    def split(self, query: str, documents: Sequence[str]) -> list[list[Segment]]:
        template = self._vocabulary.rerank_template
        if template is None:
            return [[Segment(text)] for text in (query, *documents)]
        parts: list[str] = PLACES.split(template)
        fenced = self._fences.enclose(query)
        texts = (
            "".join({"{query}": fenced, "{document}": text}.get(part, part) for part in parts)
            for text in map(self._fences.enclose, documents)
        )
        return [self._fences.split(text, add_special=False) for text in texts]

    def join(self, tokenized: Iterable[list[int]]) -> list[list[int]]:
        """Return the token ids of each document with the query."""
        if self._vocabulary.rerank_template is not None:
            return list(tokenized)
        before, between, behind = self._vocabulary.pair_tokens
        query, *documents = tokenized
        return [[*before, *query, *between, *tokens, *behind] for tokens in documents]


def name_texts(param: str, count: int) -> list[str]:
    """Return the names that errors use for the texts of the list ``param``."""
    return [f"{param}[{i}]" for i in range(count)]


def read_scores(vectors: npt.NDArray[np.float32], info: ModelInfo) -> list[float]:
    """Return the scores of documents. ``vectors`` are those of the pairs if the model is a
    reranker, and otherwise those of the query and the documents.
    """
    scores = vectors[:, 0] if info.pooling == "rank" else vectors[1:] @ vectors[0]
    return cast("list[float]", scores.tolist())
