"""``cllm rpc-worker``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cllm.cli.options import Positive
from cllm.environment import count_cpus
from cllm.observe import log


def rpc_worker(
    *,
    address: Annotated[
        str,
        Parameter(help="Where to listen: loopback or an address of a private network, and a port."),
    ] = "127.0.0.1:50052",
    devices: Annotated[
        str | None,
        Parameter(help="Devices to lend, such as CUDA0,CUDA1. [default: all GPUs, else the CPU]"),
    ] = None,
    threads: Annotated[
        int | None, Parameter(validator=Positive, help="Threads of the CPU. [default: all cores]")
    ] = None,
    cache: Annotated[
        Path | None,
        Parameter(help="A folder for weights that servers have sent, so that restarts are faster."),
    ] = None,
) -> None:
    """Compute for a server on another machine until Ctrl-C."""
    from cllm.backends.llama_cpp import rpc

    log.configure("warning")
    names = [name.strip() for name in (devices or "").split(",") if name.strip()]
    rpc.serve(address, names, threads or count_cpus(), cache)
