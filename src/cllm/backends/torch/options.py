"""The options of the PyTorch backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

SUMMARY = "runs checkpoints (folders with safetensors) and some GGUF files with PyTorch"


class Options(BaseModel):
    """How PyTorch computes."""

    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = Field(
        default="auto",
        description="Where the model computes; auto takes a GPU if PyTorch finds one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Type of the weights and of keys and values; auto is the checkpoint's own "
        "type on GPUs and, if that is bfloat16, on CPUs with matrix instructions for it (AMX); "
        "otherwise float32.",
    )
    n_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads that compute on the CPU; null uses all cores.",
    )
