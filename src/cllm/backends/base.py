"""The contract of a backend, and of the vocabulary that belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cllm.core.batch import Batch, Chunk

if TYPE_CHECKING:  # its import takes a tenth of a second
    from llguidance import LLTokenizer

Logits = npt.NDArray[np.float32]
Vectors = npt.NDArray[np.float32]


class ModelInfo(msgspec.Struct, frozen=True):
    """What is known of a loaded model.

    context_length: the most tokens one sequence may hold. num_cells: tokens the KV cache holds in all.
    layout: "unified" (all sequences draw on one pool and can share cells) or "partitioned" (each has its own).
    can_trim: whether a sequence can give back some of its cells; recurrent state is kept or lost as a whole.
    layout_seconds: what it takes to lay out the cells anew, empty. tile: tokens of a prompt that are computed as one; a
    part of a tile costs nearly as much as all of it. num_spare_ids: seq_ids from max_num_seqs on that can hold tokens
    but not be computed. kv_bytes_per_token (0 if unknown) and model_bytes are sizes in bytes; a saved state of n tokens
    takes state_bytes + n * state_bytes_per_token. fingerprint: of the model and of all that its saved states depend on.

    generates: False for a model that gives vectors alone. embedding_size: numbers of a vector; 0 if it gives none.
    pooling: how a text's vector comes from those of its tokens: mean, last, cls (the first), or rank: it is one number,
    of how well a text, which is a query and a document, fits together. max_embedding_tokens: of one text.
    embedding_bite: tokens that one call of ``embed`` may have; if embeds_whole, texts must not be cut, and one that is
    longer may be there alone.
    """

    name: str
    architecture: str
    description: str
    vocabulary_size: int
    context_length: int
    trained_context_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_samples: int
    num_cells: int
    layout: str
    end_tokens: list[int]
    tile: int = 16
    can_trim: bool = True
    num_spare_ids: int = 0
    can_change_layout: bool = False
    layout_seconds: float = 0.0
    model_bytes: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    state_bytes_per_token: int = 0
    fingerprint: str = ""
    system: str = ""
    generates: bool = True
    embedding_size: int = 0
    pooling: str = "mean"
    max_embedding_tokens: int = 0
    embedding_bite: int = 64
    embeds_whole: bool = False


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
        """Lay the cells out anew, all of them empty; ``info`` changes, snapshots stay. If can_change_layout."""
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
