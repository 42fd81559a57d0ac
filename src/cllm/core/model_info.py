"""What is known of a loaded model."""

from __future__ import annotations

import msgspec


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
