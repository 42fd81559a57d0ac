"""cLLM: a server for GGUF language models on llama.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cllm.core.params import SamplingParams
    from cllm.errors import BadRequest, EngineError, StartupError
    from cllm.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BadRequest",
    "Completion",
    "EngineError",
    "SamplingParams",
    "StartupError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``cllm --help`` stays quick."""
    if name == "SamplingParams":
        from cllm.core.params import SamplingParams

        return SamplingParams
    if name in ("BadRequest", "EngineError", "StartupError"):
        from cllm import errors

        return getattr(errors, name)
    if name in ("LLM", "Completion"):
        from cllm import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'cllm' has no attribute {name!r}")
