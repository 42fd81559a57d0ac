"""Writes LoRA adapters with random weights for a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

MATRICES = ("attn_q", "attn_v", "ffn_up", "ffn_down")


def write_adapter(
    path: Path,
    model: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    strength: float = 1.0,
    invocation: Sequence[int] = (),
) -> Path:
    """Write an adapter that changes some matrices of all layers of ``model``. A ``strength`` of 1
    is enough to change the answers; 0 changes nothing. An activated LoRA is activated by the tokens
    ``invocation``.
    """
    reader, random = gguf.GGUFReader(model), np.random.default_rng(seed)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(rank))
    if invocation:
        writer.add_key_value(
            gguf.Keys.Adapter.ALORA_INVOCATION_TOKENS,
            [*invocation],
            gguf.GGUFValueType.ARRAY,
            gguf.GGUFValueType.UINT32,
        )
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and tensor.name.split(".")[2] in MATRICES:
            num_in, num_out = map(int, tensor.shape)
            a = random.normal(0, num_in**-0.5, (rank, num_in)).astype(np.float32)
            b = random.normal(0, strength * rank**-0.5, (num_out, rank)).astype(np.float32)
            writer.add_tensor(f"{tensor.name}.lora_a", a)
            writer.add_tensor(f"{tensor.name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
