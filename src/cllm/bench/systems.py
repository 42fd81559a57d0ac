"""The servers to compare, and the settings in which each of them is tried."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from cllm.bench.comparison import CLLM, DEFAULT_SERVER, EXAMPLE, LLAMA_SERVER, OLLAMA
from cllm.bench.peers import find, find_example_server, needed
from cllm.bench.servers import Server, cllm, example_server, llama_server, ollama
from cllm.errors import StartupError

Opener = Callable[[int, int], AbstractContextManager[Server]]
"""(number of concurrent sequences, context of each) -> a context manager that yields a running
server.
"""

Openers = dict[str, Opener]
"""Settings to try -> function that starts the server with them."""


def find_servers(
    model: Path, threads: int, peers: Path, default_peers: Path, skipped: dict[str, str]
) -> dict[str, Openers]:
    """Return the servers by name. Adds the reason to ``skipped`` for each one that is missing.

    Raises StartupError if there is no llama-server.
    """
    servers = {
        CLLM: cllm_openers(model, threads),
        LLAMA_SERVER: llama_server_openers(needed("llama-server", peers), model, threads),
    }
    if (default_program := default_peers / "llama-server").exists():
        servers[DEFAULT_SERVER] = llama_server_openers(default_program.absolute(), model, threads)
    else:
        skipped[DEFAULT_SERVER] = f"not in {default_peers}"
    if found := find("ollama", peers):
        servers[OLLAMA] = {"default": partial(ollama, found, model, threads)}
    else:
        skipped[OLLAMA] = "not installed"
    try:
        servers[EXAMPLE] = example_openers(find_example_server(peers), model, threads)
    except StartupError as error:
        skipped[EXAMPLE] = str(error)
    return servers


def cllm_openers(model: Path, threads: int) -> Openers:
    def start(num_seqs: int, context: int) -> AbstractContextManager[Server]:
        flags = ("--max-num-seqs", num_seqs, "--context", context, "--threads", threads)
        # llama-server runs without them too
        off = ("--scheduler.speculation", "off", "--kv.ram-cache-mb", 0)
        return cllm(model, *flags, *off, "--log.level", "error")

    return {"default": start}


def llama_server_openers(program: Path, model: Path, threads: int) -> Openers:
    def start(
        flags: tuple[object, ...], num_seqs: int, context: int
    ) -> AbstractContextManager[Server]:
        sizes = ("-np", num_seqs, "-c", num_seqs * context, "--cache-ram", 0)
        return llama_server(model, *sizes, *flags, program=program, threads=threads)

    settings: dict[str, tuple[object, ...]] = {
        "default": (),
        "-b 512": ("-b", 512),
        "-kvu": ("-kvu",),
    }
    return {name: partial(start, flags) for name, flags in settings.items()}


def example_openers(script: Path, model: Path, threads: int) -> Openers:
    return {
        name: partial(example_server, script, model, threads, unified)
        for name, unified in (("kv_unified", True), ("not kv_unified", False))
    }
