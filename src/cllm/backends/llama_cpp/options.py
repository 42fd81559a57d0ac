"""The options of llama.cpp."""

from __future__ import annotations

from pydantic import BaseModel, Field

SUMMARY = "runs models"


class Options(BaseModel):
    """How llama.cpp computes."""

    n_threads: int | None = Field(
        default=None, ge=1, le=1024, description="Threads that compute; null uses all cores."
    )
    n_threads_batch: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads for steps with more than one token (prompts, several sequences); "
        "null uses n_threads.",
    )
    n_ubatch: int = Field(
        default=512,
        ge=1,
        le=8192,
        description="Largest number of tokens in one pass over the weights.",
    )
    n_gpu_layers: int = Field(
        default=99,
        ge=-1,
        le=10_000,
        description="Layers on the GPU, if there is one; 0 is none, -1 is all.",
    )
    use_mmap: bool = Field(
        default=True, description="Map the model file into memory instead of reading it."
    )
    use_mlock: bool = Field(
        default=False, description="Lock the model in RAM, so that it is never swapped out."
    )
