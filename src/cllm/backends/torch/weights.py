"""Reads the tensors of a checkpoint's safetensors files."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from cllm.errors import StartupError
from cllm.models.checkpoint import Checkpoint

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
        if stored.dtype not in DTYPES:
            raise StartupError(
                f"{folder}: the tensor {name} is {stored.dtype}, and the torch backend reads only "
                f"{', '.join(DTYPES)}: convert the checkpoint to one of these types"
            )
        if self._progress:
            self._progress(min(1.0, self._num_read / max(1, self._checkpoint.tensor_bytes)))
        self._num_read += stored.end - stored.begin
        count, kind = (stored.end - stored.begin), DTYPES[stored.dtype]
        if not count:
            return torch.empty(stored.shape, dtype=self.dtype, device=self.device)
        found = torch.frombuffer(
            self._map(stored.file), dtype=torch.uint8, count=count, offset=stored.begin
        )
        if stored.begin % kind.itemsize:  # torch computes with aligned numbers only
            found = found.clone()
        return found.view(kind).view(stored.shape).to(self.device, self.dtype)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._files:
            with file.open("rb") as opened:
                # writes would change private copies: torch wants memory that can be written
                self._files[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._files[file]
