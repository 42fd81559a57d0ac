"""``cllm doctor``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cllm import __version__
from cllm.cli.probe import Probe, probe
from cllm.models.gguf import size_text
from cllm.models.memory import available_bytes

FLAGS = "-fno-tree-sra -fno-tree-dse -fno-dse -w"
REBUILD = "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python llama-cpp-python==0.3.36"


def doctor(
    *, as_json: Annotated[bool, Parameter(name="--json", help="Print one JSON object.", negative="")] = False
) -> None:
    """Check this machine: decode one answer in a child process and say what was found, and the cure if it failed."""
    found = probe()
    report = {
        "cllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "cpu": cpu_name(),
        "memory available": size_text(available_bytes() or 0),
        "llama-cpp-python": installed("llama-cpp-python"),
        "compiled by": found.compiler or "not known",
        "llama.cpp uses": found.system or "not known",
        "GPU offload": "built in" if found.gpu_offload else "not built in",
        "decoding": "works: the built-in model answered right" if found.passed else failure(found),
    }
    if as_json:
        print(json.dumps({**report, "passed": found.passed, "cure": cure(found)}))
    else:
        for name, value in report.items():
            print(f"{name:>17}: {value}")
        if not found.passed:
            print(f"{'cure':>17}: {cure(found)}")
    if not found.passed:
        sys.exit(1)


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def failure(found: Probe) -> str:
    return f"FAILS: {found.error}" if found.error else f"WRONG: the built-in model answered {found.answer!r}"


def cure(found: Probe) -> str:
    """What to do about a failure, in one line; nothing if there is none."""
    if found.passed:
        return ""
    if "No module named" in found.error and "llama_cpp" in found.error:
        return "llama.cpp is not installed: make serve, or see the README for pip"
    if found.died_of in ("SIGSEGV", "SIGILL") or not found.error:
        return f'this build of llama.cpp is broken for this CPU; build it again: CXXFLAGS="{FLAGS}" CFLAGS=-w {REBUILD}'
    if "no answer" in found.error:
        return "the machine is very busy or the build is broken: end other programs and try again"
    return "see the message above; cllm serve --log.level debug says more"


def cpu_name() -> str:
    """The CPU and whether it has the matrix unit that some compilers get wrong."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    amx = ", with AMX" if "amx_tile" in fields.get("flags", "") else ""
    return fields.get("model name", platform.machine()) + amx
