"""What the header of a GGUF file says of the memory that a sequence takes."""

from __future__ import annotations

from cllm.errors import StartupError
from cllm.models.gguf import MAX_HEADS, MAX_KEPT_ARRAY, TENSOR_TYPES, GgufHeader, Value

KV_BLOCKS = {
    name.lower(): block for name, *block in TENSOR_TYPES.values() if name in ("F16", "Q8_0", "Q4_0")
}
"""The types of KV cells, by their names in the settings: elements per block, bytes per block."""

RECURRENT_KEYS = (".ssm.", ".shortconv.", ".wkv.", ".kda.")  # parts of names of metadata


def compute_kv_bytes_per_token(header: GgufHeader, kv_type: str = "f16") -> int | None:
    """Return the bytes of one token's keys and values over all layers; an upper bound with sliding
    windows.

    None if the metadata is not sufficient: attention with compressed keys, recurrent layers that
    are not listed.
    """
    layers, heads = header.get_number("block_count"), header.get_number("attention.head_count")
    kv_heads = header.get_number("attention.head_count_kv") or heads
    compressed = header.get_number("attention.kv_lora_rank") is not None
    if not isinstance(layers, int) or not 0 < layers <= MAX_KEPT_ARRAY or compressed:
        return None
    if has_recurrent_layers(header) and not isinstance(kv_heads, tuple):
        return None
    per_layer = kv_heads if isinstance(kv_heads, tuple) else (kv_heads,) * layers
    counts = [count for count in per_layer if isinstance(count, int) and 0 <= count <= MAX_HEADS]
    lengths = [_get_head_length(header, part, heads) for part in ("key", "value")]
    if len(counts) != layers or any(length is None for length in lengths):
        return None
    elements, num_bytes = KV_BLOCKS[kv_type]
    return (
        sum(counts)
        * sum(length for length in lengths if length is not None)
        * num_bytes
        // elements
    )


def has_recurrent_layers(header: GgufHeader) -> bool:
    return any(part in key for key in header.metadata for part in RECURRENT_KEYS)


def check_kv_type(header: GgufHeader, kv_type: str) -> None:
    """Raise StartupError if keys or values do not divide into the blocks of the type."""
    elements, _ = KV_BLOCKS[kv_type]
    for part in ("key", "value"):
        length = _get_head_length(header, part, header.get_number("attention.head_count"))
        if length is not None and length % elements:
            raise StartupError(
                f"kv.type {kv_type} stores numbers in blocks of {elements}, but a {part} of this "
                f"model has {length} numbers: use kv.type f16"
            )


def _get_head_length(header: GgufHeader, part: str, heads: Value | None) -> int | None:
    length = header.get_number(f"attention.{part}_length")
    if length is None:
        width = header.get_number("embedding_length")
        most = (
            max((h for h in heads if isinstance(h, int)), default=0)
            if isinstance(heads, tuple)
            else heads
        )
        if isinstance(width, int) and isinstance(most, int) and most > 0:
            return width // most
    return length if isinstance(length, int) and length > 0 else None
