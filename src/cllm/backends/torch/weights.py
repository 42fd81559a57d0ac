"""Reads the tensors of checkpoints, from safetensors or GGUF files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cllm.backends.torch.gguf_checkpoint import GgufCheckpoint
from cllm.errors import StartupError
from cllm.models.checkpoint import Checkpoint, StoredTensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Weights:
    """The tensors of a checkpoint, as ``dtype`` on ``device``.

    Where they are stored like that, they stay in the mapped files, so that other processes share
    their memory.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """``progress`` receives the share of the bytes that were read."""
        self._checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self._files: dict[Path, mmap.mmap] = {}
        self._progress, self._num_read = progress, 0

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def read(self, name: str, shape: Sequence[int] | None = None) -> Tensor:
        """Raises StartupError if the tensor is missing or has another shape or an unknown type."""
        folder, stored = self._checkpoint.folder, self._checkpoint.tensors.get(name)
        if stored is None:
            raise StartupError(f"{folder}: the checkpoint has no tensor {name}")
        if shape is not None and stored.shape != tuple(shape):
            raise StartupError(
                f"{folder}: the tensor {name} has the shape {list(stored.shape)}, "
                f"but the settings say {list(shape)}"
            )
        if self._progress:
            self._progress(min(1.0, self._num_read / max(1, self._checkpoint.tensor_bytes)))
        self._num_read += stored.end - stored.begin
        if stored.begin == stored.end:
            return torch.empty(stored.shape, dtype=self.dtype, device=self.device)
        return self._convert(name, stored).to(self.device, self.dtype)

    def _convert(self, name: str, stored: StoredTensor) -> Tensor:
        """Return the tensor as PyTorch can have it, in the mapped file if that is possible."""
        if stored.dtype not in DTYPES:
            raise StartupError(
                f"{self._checkpoint.folder}: the tensor {name} is {stored.dtype}, and the torch "
                f"backend reads only {', '.join(DTYPES)}: convert the checkpoint to one of these "
                "types"
            )
        kind, found = DTYPES[stored.dtype], self._view(stored)
        if stored.begin % kind.itemsize:  # torch computes with aligned numbers only
            found = found.clone()
        return found.view(kind).view(stored.shape)

    def _view(self, stored: StoredTensor) -> Tensor:
        """Return the tensor's bytes."""
        data, count = self._map(stored.file), stored.end - stored.begin
        if stored.end > len(data):
            raise StartupError(f"{stored.file} was shortened while it was loaded")
        return torch.frombuffer(data, dtype=torch.uint8, count=count, offset=stored.begin)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._files:
            with file.open("rb") as opened:
                # writes would change private copies: torch wants memory that can be written
                self._files[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._files[file]


class GgufWeights(Weights):
    """The tensors of GGUF files, dequantized, and with rows in the order of checkpoints."""

    def __init__(
        self,
        checkpoint: GgufCheckpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        super().__init__(checkpoint, dtype, device, progress)
        self._num_heads = checkpoint.num_heads

    def _convert(self, name: str, stored: StoredTensor) -> Tensor:
        if stored.dtype in DTYPES:
            found = super()._convert(name, stored)
        else:
            from gguf import GGMLQuantizationType
            from gguf.quants import dequantize

            blocks = self._view(stored).view(*stored.shape[:-1], -1).numpy()
            found = torch.from_numpy(dequantize(blocks, GGMLQuantizationType[stored.dtype]))
        heads = self._num_heads.get(name)
        if heads is None:
            return found
        rows, *rest = found.shape
        return found.view(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


def open_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] | None = None,
) -> Weights:
    if isinstance(checkpoint, GgufCheckpoint):
        return GgufWeights(checkpoint, dtype, device, progress)
    return Weights(checkpoint, dtype, device, progress)
