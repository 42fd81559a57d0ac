"""The contract of a backend, and of the vocabulary that belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch, Chunk
from cllm.core.model_info import ModelInfo

if TYPE_CHECKING:  # its import takes a tenth of a second
    from llguidance import LLTokenizer

Logits = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float32]


class Blank(NamedTuple):
    """``data`` is filled by whoever asked for it; ``state`` is the backend's own business."""

    data: memoryview
    state: Any


class Backend(Protocol):
    """Holds a model and its KV cells. One thread calls it.

    The caller guarantees: ``batch.num_tokens`` <= max_num_batched_tokens, ``batch.num_samples`` <= max_num_samples;
    every token id is in the vocabulary; the seq_id of a row is below max_num_seqs, that of an operation below
    max_num_seqs + num_spare_ids; a row starts at the number of cells its seq_id holds after the batch's operations; a
    Load finds free cells for the whole snapshot, though it keeps only num_tokens of them.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def vocabulary(self) -> Vocabulary:
        """Of the model that is loaded; another thread may read it."""
        ...

    def forward(self, batch: Batch) -> Logits:
        """Carry out the operations, compute the rows.

        Returns logits of the sampled positions in the order of the batch, shape (num_samples, vocabulary_size), a
        view that holds until the next call and that the caller may write to. Raises EngineError if the backend fails;
        what the seq_ids that the batch touches hold, and which operations were carried out, is then unknown.
        """
        ...

    def embed(self, chunks: list[Chunk]) -> Vectors:
        """Of each chunk the sum of its tokens' vectors (mean), the last, the first, or the score, as ``info.pooling``.

        Shape (len(chunks), embedding_size), float32, the caller's own. What ``forward`` computes is not touched. The
        caller guarantees what ModelInfo and MAX_CHUNKS say; that a text longer than all before it begins a bite; that
        all chunks but the last end their texts, all but the first begin one, and that the first, if it begins none,
        goes on where the last of the call before has ended. Raises EngineError; no text can be gone on with then.
        """
        ...

    def snapshot(self, key: int) -> memoryview:
        """The bytes of what Save kept under ``key``; they do not change. Raises KeyError."""
        ...

    def blank(self, num_bytes: int) -> Blank:
        """Memory to be filled with bytes that ``snapshot`` gave, maybe in another process with the same fingerprint."""
        ...

    def adopt(self, key: int, filled: Blank) -> None:
        """Take what a blank was filled with as the snapshot ``key``."""
        ...

    def change_layout(self, layout: str) -> None:
        """Lay the cells out anew, all of them empty; ``info`` changes, snapshots stay. If can_change_layout.

        Raises EngineError if the layout stays what it was, and StartupError if the backend cannot be used any longer.
        """
        ...

    def close(self) -> None:
        """Free everything; the object is dead afterwards."""
        ...


class Vocabulary(Protocol):
    """Text to token ids and token ids to bytes."""

    @property
    def size(self) -> int: ...

    @property
    def pieces(self) -> list[bytes]:
        """The bytes each token id adds to the text; control tokens add none."""
        ...

    @property
    def control_tokens(self) -> list[str]:
        """The texts that become one control token when special tokens are parsed, longest first."""
        ...

    @property
    def infill_tokens(self) -> tuple[int, int, int] | None:
        """What marks a prefix, a suffix, and the middle that is to be written; None if the model knows no such."""
        ...

    @property
    def repository_tokens(self) -> tuple[int, int] | None:
        """The tokens before the name of a repository and before each of its files; None if the model has none."""
        ...

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of tokens that stand for more than their text, by id; a grammar must name them to allow them."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def special_texts(self) -> dict[str, Any]:
        """The names templates use: ``bos_token``, ``eos_token``."""
        ...

    @property
    def rerank_template(self) -> str | None:
        """What a reranker reads, with {query} and {document} in it; None if that is only ``pair_tokens``."""
        ...

    @property
    def pair_tokens(self) -> tuple[list[int], list[int], list[int]]:
        """What stands before, between and behind the two texts of a pair."""
        ...

    def text_of(self, token: int) -> bytes:
        """The bytes of a token, which is in the vocabulary; of a control token its name."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """``add_special``: the model's begin and end tokens; ``parse_special``: control tokens written in the text."""
        ...

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        """What grammars are compiled for; takes up to a second. A text may end with any of ``end_tokens``."""
        ...
