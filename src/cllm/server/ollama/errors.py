"""Recognizes Ollama's requests, and builds their error answers."""

from __future__ import annotations

from pydantic_core import to_json
from starlette.datastructures import Headers
from typing_extensions import TypedDict

from cllm.server.errors import Dialect, Fault, describe_in_stream

UNKNOWN = "model {asked!r} not found; this server has {served!r}"


class OllamaErrorAnswer(TypedDict):
    error: str


def speaks_ollama(path: str, _: Headers) -> bool:
    return path == "/api" or path.startswith("/api/")


def ollama_error(fault: Fault, _: str) -> tuple[int, OllamaErrorAnswer]:
    """Build an error answer. A full queue is 503, as in Ollama."""
    return 503 if fault.code == "queue_full" else fault.status, {"error": fault.message}


def error_line(error: Exception) -> bytes:
    return to_json({"error": describe_in_stream(error).message}) + b"\n"


DIALECT = Dialect(speaks_ollama, ollama_error)
