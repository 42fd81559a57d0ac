"""The results of ``cllm bench compare``: what was measured of each system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from cllm.errors import StartupError

CLLM, ENGINE, BOUND, LLAMA_SERVER = (
    "cLLM",
    "engine in process",
    "llama-batched-bench",
    "llama-server",
)
DEFAULT_SERVER = "llama-server, default build"
OLLAMA, EXAMPLE = "Ollama", "llama-cpp-python's example server"


class Run(msgspec.Struct, kw_only=True):
    """One system at one concurrency in one round. Rates and latencies are those of successful
    requests. None: not measured.

    output_tokens_per_s: over the time from the first prompt to the last token. decode_tokens_per_s:
    of steps in which all sequences decode. load_s: loading the model alone. memory_mb: PSS of all
    the system's processes after the work. cpu_us_per_token: CPU time of cLLM's API process.
    """

    system: str
    settings: str = ""
    num_seqs: int
    round: int
    num_requests: int
    num_succeeded: int
    failures: dict[str, int] = {}
    output_tokens_per_s: float
    decode_tokens_per_s: float | None = None
    ttft_ms: float | None = None
    itl_p50_ms: float | None = None
    itl_p99_ms: float | None = None
    start_s: float | None = None
    load_s: float | None = None
    memory_mb: float | None = None
    cpu_us_per_token: float | None = None


class Parts(msgspec.Struct):
    """Microseconds of a decoding step of the engine, by part."""

    num_seqs: int
    step_us: dict[str, float]


class Depth(msgspec.Struct, kw_only=True):
    """Speeds in tokens/s after ``context`` tokens. Decoding speed is by number of sequences."""

    system: str
    context: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: dict[int, float]


class Results(msgspec.Struct, kw_only=True):
    """All measurements, as ``--json`` writes and ``--from`` reads them."""

    date: str
    machine: dict[str, str]
    setup: dict[str, Any]
    skipped: dict[str, str] = {}
    """System -> why it was not measured."""
    llama_bench: dict[str, list[float]] = {}
    """Test -> tokens/s of each round, for the build with cLLM's compiler switches."""
    default_bench: dict[str, list[float]] = {}
    """The same for llama.cpp's default build."""
    trials: list[Run] = []
    runs: list[Run] = []
    kept: list[Run] = []
    """Runs over kept-alive connections."""
    shared: list[Run] = []
    """Runs whose prompts share a prefix."""
    curve: list[Run] = []
    parts: list[Parts] = []
    depths: list[Depth] = []


def read_results(path: Path) -> Results:
    """Return the results in a file. Raises StartupError with a message of one line."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} holds no results of cllm bench compare: {error}") from None
