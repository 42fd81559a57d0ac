"""The options of llama.cpp."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

SUMMARY = "runs models"


class Options(BaseModel):
    """How llama.cpp computes."""

    n_threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Threads that compute; null uses all cores, and fewer while other programs use "
        "them.",
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
    split: Literal["none", "layer", "tensor"] = Field(
        default="layer",
        description="How several GPUs share a model: none puts it on one, layer gives each some "
        "layers, tensor divides every layer (experimental; needs f16 KV and flash attention).",
    )
    tensor_split: str | None = Field(
        default=None,
        max_length=200,
        description="Shares of the GPUs, such as 3,1; null divides by their free memory.",
    )
    devices: str | None = Field(
        default=None,
        max_length=1000,
        description="GPUs to use, such as CUDA0,CUDA1; cllm doctor lists them. Null uses all.",
    )
    rpc: str | None = Field(
        default=None,
        max_length=1000,
        description="RPC workers (cllm rpc-worker) whose devices are used like GPUs, such as "
        "10.0.0.5:50052, with commas between them. Whoever reaches a worker can run code on "
        "it, and prompts are sent unencrypted: only loopback and private addresses are allowed. "
        "Needs a build of llama.cpp with GGML_RPC.",
    )
    main_gpu: int = Field(
        default=0, ge=0, le=15, description="Number of the GPU to use if split is none."
    )
    cpu_moe_layers: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="Layers, from the first one, whose experts stay in RAM, for models with "
        "experts that do not fit the GPU.",
    )
    override_tensors: str | None = Field(
        default=None,
        max_length=4000,
        description="Patterns of tensor names and the device for them, such as "
        "blk\\.[0-3]\\.ffn_.*=CPU, with commas between them.",
    )
    numa: Literal["off", "distribute", "isolate", "numactl"] = Field(
        default="off",
        description="How memory and threads are spread over NUMA nodes: distribute over all, "
        "isolate on the one where the server starts, or as numactl says.",
    )
    flash_attention: Literal["auto", "on", "off"] = Field(
        default="auto", description="Whether to use flash attention; auto where it is supported."
    )
    kernels: Literal["auto", "off"] = Field(
        default="auto",
        description="cLLM's attention kernel for CPUs, and its choice between llama.cpp's matrix "
        "products: auto uses them if llama.cpp was built with them (cllm doctor says so), off uses "
        "what llama.cpp has.",
    )
    rope_scaling: Literal["auto", "none", "linear", "yarn"] = Field(
        default="auto",
        description="How positions beyond the trained context are scaled; auto does what the "
        "model's file says.",
    )
    rope_scale: float = Field(
        default=1.0,
        ge=1,
        le=1000,
        description="Factor by which the context becomes longer than the trained one.",
    )
    rope_freq_base: float | None = Field(
        default=None, gt=0, le=1e12, description="Base frequency of positions; null is the model's."
    )
    yarn_original_context: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Context length that YaRN scales; null is the trained one.",
    )
