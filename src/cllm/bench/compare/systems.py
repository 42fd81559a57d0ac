"""The servers to compare, and the settings in which each of them is tried."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cllm.bench.compare.rounds import (
    CLLM,
    DEFAULT_SERVER,
    EXAMPLE,
    FIXED,
    LLAMA_SERVER,
    OLLAMA,
    PLAIN,
    RESTARTED,
)
from cllm.bench.peers import find, find_example_server, find_required
from cllm.bench.servers import RunningServer, cllm, example_server, llama_server, ollama
from cllm.errors import StartupError
from cllm.models.catalog import BUILTIN

Opener = Callable[[], AbstractContextManager[RunningServer]]
"""Returns a context manager that yields a running server."""

Openers = dict[str, Opener]
"""Settings to try -> function that starts the server with them."""

FIXED_STREAMS = (32, 8, 4)  # numbers of sequences with cells of their own


class Purpose(NamedTuple):
    """The purpose for which a server is started.

    ``model`` None means the built-in one. ``num_cells`` is the size of cLLM's KV cache in tokens,
    which the other systems also get. ``peers`` and ``default_peers`` are folders of llama.cpp's
    programs. ``settings`` are the flags to try; if it is empty, those of this module. ``folder``
    replaces "FOLDER" in them.
    """

    model: Path | None
    clients: int
    num_cells: int
    peers: Path
    default_peers: Path
    settings: Sequence[str] = ()
    folder: Path = Path()

    @property
    def file(self) -> Path:
        return self.model or BUILTIN

    @property
    def context(self) -> int:
        """Tokens of each sequence if each client has cells of its own."""
        return self.num_cells // self.clients


def cllm_openers(purpose: Purpose) -> Openers:
    """Start cLLM as users do, without any option, unless the row has settings."""
    openers: Openers = {}
    for settings in purpose.settings or ("",):
        flags = (word.replace("FOLDER", str(purpose.folder)) for word in settings.split())
        openers[settings] = partial(cllm, purpose.model, *flags, name=None)
    return openers


def fixed_openers(purpose: Purpose) -> Openers:
    """Start cLLM with a pool, and with several numbers of sequences with cells of their own."""
    layouts: list[tuple[object, ...]] = [("--kv.layout", "unified")]
    for count in FIXED_STREAMS:
        context = purpose.num_cells // count
        sizes = ("--context", context, "--max-num-seqs", count)
        layouts += [("--kv.layout", "partitioned", *sizes)]
    return {
        name_setting(flags): partial(cllm, purpose.model, *flags, name=None) for flags in layouts
    }


def default_build_openers(purpose: Purpose) -> Openers:
    """Raises StartupError if it is not built."""
    program = purpose.default_peers / "llama-server"
    if not program.exists():
        raise StartupError(f"not in {purpose.default_peers}")
    return llama_server_openers(purpose, program.absolute())


def llama_server_openers(purpose: Purpose, program: Path | None = None) -> Openers:
    """Start llama-server with its default settings, with a slot for each client, and with one pool
    of cells for these slots, unless the row has settings.

    Raises StartupError if it is not built.
    """
    program = program or find_required("llama-server", purpose.peers)
    sizes = ("-np", purpose.clients, "-c", purpose.num_cells, "-t", os.cpu_count() or 1)
    settings: list[tuple[object, ...]] = [(), sizes]
    if purpose.clients > 1:
        settings.append((*sizes, "-kvu"))
    if purpose.settings:
        settings = [tuple(flags.split()) for flags in purpose.settings]
    return {
        name_setting(flags): partial(llama_server, purpose.file, *flags, program=program)
        for flags in settings
    }


def ollama_openers(purpose: Purpose) -> Openers:
    """Raises StartupError if it is not installed."""
    program = find("ollama", purpose.peers)
    if program is None:
        raise StartupError("not installed")
    cores = os.cpu_count() or 1
    return {
        "default": partial(ollama, program, purpose.file, cores, purpose.clients, purpose.context)
    }


def example_openers(purpose: Purpose) -> Openers:
    """Raises StartupError if it is not installed."""
    script, cores = find_example_server(purpose.peers), os.cpu_count() or 1
    return {
        name: partial(
            example_server, script, purpose.file, cores, unified, purpose.clients, purpose.context
        )
        for name, unified in (("kv_unified", True), ("not kv_unified", False))
    }


def name_setting(flags: tuple[object, ...]) -> str:
    return " ".join(map(str, flags)) or "default"


OPENERS: dict[str, Callable[[Purpose], Openers]] = {
    CLLM: cllm_openers,
    PLAIN: cllm_openers,
    RESTARTED: cllm_openers,
    FIXED: fixed_openers,
    LLAMA_SERVER: llama_server_openers,
    DEFAULT_SERVER: default_build_openers,
    OLLAMA: ollama_openers,
    EXAMPLE: example_openers,
}
