"""cLLM: a server for language models on llama.cpp and PyTorch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cllm.core.params import SamplingParams
    from cllm.errors import BadRequest, EngineError, StartupError
    from cllm.local.async_llm import AsyncLLM
    from cllm.local.completion import Completion, Output, Piece, Ranked, ToolCall
    from cllm.local.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BadRequest",
    "Completion",
    "EngineError",
    "Output",
    "Piece",
    "Ranked",
    "SamplingParams",
    "StartupError",
    "ToolCall",
    "__version__",
]

_MODULES = {
    "LLM": "local.llm",
    "AsyncLLM": "local.async_llm",
    "SamplingParams": "core.params",
    **dict.fromkeys(("BadRequest", "EngineError", "StartupError"), "errors"),
    **dict.fromkeys(("Completion", "Output", "Piece", "Ranked", "ToolCall"), "local.completion"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``cllm --help`` stays quick."""
    if name in _MODULES:
        return getattr(import_module(f"cllm.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'cllm' has no attribute {name!r}")
