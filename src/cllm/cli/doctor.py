"""``cllm doctor``."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cllm import __version__
from cllm.cli.hardware import find_machine_gpus, suggest_gpu_build
from cllm.cli.model_sizes import describe_fits, list_fits
from cllm.cli.probe import Probe, probe
from cllm.environment import count_cpus, count_own_cpus, read_cpu_quota
from cllm.models.gguf import format_size
from cllm.models.memory import measure_available_bytes

# As in pyproject.toml, which an installed package does not have.
SWITCHES = (
    "-fno-tree-sra -fno-tree-dse -fno-dse -fschedule-insns -fsched-pressure "
    "-frecord-gcc-switches -w"
)
FASTER = ("-fschedule-insns", "-fsched-pressure")
# as benchmarks/build_flags.py measures
GAIN = "prompts are computed 1.15 to 1.4 times as fast on CPUs with AVX2"
CLANG = (
    "clang 19 with its OpenMP library: prompts are computed 1.1 to 1.2 times as fast; "
    "see docs/install.md"
)
WITHOUT_KERNEL = (
    "llama.cpp's; builds by make and tools/setup.sh, and cLLM's wheels, have a faster one"
)
# A vector extension: its name in /proc/cpuinfo -> its name in llama.cpp's system info.
EXTENSIONS = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "amx_int8": "AMX_INT8",
}
WIDEST = {"amx_tile": "AVX-512 and AMX", "avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX"}
REBUILD = (
    "pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
    "llama-cpp-python==0.3.36"
)
BUILD = f'CXXFLAGS="{SWITCHES}" CFLAGS=-w {REBUILD}'


def doctor(
    *,
    as_json: Annotated[bool, Parameter(name="--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: generate one answer in a child process, and report the results and how to
    fix a failure.
    """
    probed = probe()
    machine_gpus = find_machine_gpus()
    available = measure_available_bytes() or 0
    on_gpu = bool(probed.gpu_offload and probed.gpu_free_bytes)
    fits = list_fits(probed.gpu_free_bytes if on_gpu else available, on_gpu=on_gpu)
    report = {
        "cllm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": describe_threads(),
        "cpu": describe_cpu(),
        "memory available": format_size(available),
        "llama-cpp-python": find_version("llama-cpp-python"),
        "CPU kernels": f"{probed.variant}, chosen for this CPU"
        if probed.variant
        else "one set, as compiled",
        "attention": f"cLLM's, for {probed.attention}" if probed.attention else WITHOUT_KERNEL,
        "compiled by": probed.compiler or "unknown",
        "compiled with": probed.switches or "not recorded",
        "a better build": suggest_build(probed, read_cpu_flags()),
        "llama.cpp uses": probed.system or "unknown",
        "GPU offload": "built in" if probed.gpu_offload else "not built in",
        "GPUs": "; ".join(probed.gpus) or "none",
        "GPUs present": "; ".join(map(str, machine_gpus)) or "none found",
        "GPU advice": suggest_gpu_build(machine_gpus, probed.gpus) or "none",
        "PyTorch": find_version("torch"),
        "decoding": "works: the built-in model answered correctly"
        if probed.passed
        else failure(probed),
    }
    if as_json:
        sizes = [fit._asdict() for fit in fits]
        whole = {**report, "what fits": sizes, "passed": probed.passed, "cure": cure(probed)}
        print(json.dumps(whole))
    else:
        short = {"decoding": report.pop("decoding"), **report}
        short["compiled with"] = shorten_switches(probed.switches or "not recorded")
        for name, value in short.items():
            print(f"{name:>17}: {value}")
        place = "the GPUs' memory" if on_gpu else "RAM, with llama.cpp's copy of half the weights"
        print(f"{'what fits':>17}: into {place}; estimated")
        print(f"{'':>17}  (size of the file: tokens of KV cache that the rest of the memory holds)")
        for line in describe_fits(fits):
            print(f"{'':>17}  {line}")
        if not probed.passed:
            print(f"{'cure':>17}: {cure(probed)}")
    if not probed.passed:
        sys.exit(1)


def describe_threads() -> str:
    """Return how many threads llama.cpp computes with if no other program uses the CPUs."""
    quota = read_cpu_quota()
    limit = "" if quota is None else f", of which the control group allows {quota:g}"
    return (
        f"{count_cpus()} by default: this process may use {count_own_cpus()} CPUs{limit}; fewer "
        "while other programs use them"
    )


def shorten_switches(switches: str) -> str:
    """Return the switches that determine the speed, and how many there are."""
    words = switches.split()
    named = [word for word in words if re.match(r"-(march|mcpu|mtune|O)", word) or word in FASTER]
    left = sum(word.startswith("-") for word in words) - len(named)
    return " ".join([*named, f"and {left} more (--json)"]) if left > 3 else switches


def find_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def failure(probed: Probe) -> str:
    return (
        f"FAILS: {probed.error}"
        if probed.error
        else f"WRONG: the built-in model answered {probed.answer!r}"
    )


def cure(probed: Probe) -> str:
    """Return how to fix a failure, in one line, or "" if there was none."""
    if probed.passed:
        return ""
    if "No module named" in probed.error and "llama_cpp" in probed.error:
        return "llama.cpp is not installed; run make serve, or see docs/install.md"
    if probed.died_of in ("SIGSEGV", "SIGILL") or not probed.error:
        return f"this build of llama.cpp does not work on this CPU; rebuild it: {BUILD}"
    if "no answer" in probed.error:
        return "the machine is very busy or the build is broken; stop other programs and try again"
    return "see the message above; cllm serve --log.level debug shows more"


def suggest_build(probed: Probe, cpu: set[str]) -> str:
    """Return the gain of another build of llama.cpp on such a CPU, and how to make that build."""
    if not probed.system:
        return "unknown"
    used = set(re.findall(r"(\w+) = 1", probed.system))
    if "AVX512_VNNI" in used:  # the same instructions, twice as wide
        used.add("AVX_VNNI")
    if unused := [name for flag, name in EXTENSIONS.items() if flag in cpu and name not in used]:
        return (
            f"this build does not use {', '.join(unused)}, which the CPU supports; a build that "
            f"does is much faster: {BUILD}"
        )
    if probed.compiler.startswith("GCC") and "avx2" in cpu:
        if not probed.switches:
            return (
                f"perhaps: this build does not record its switches. With {' '.join(FASTER)}, "
                f"{GAIN}: {BUILD}"
            )
        if not all(switch in probed.switches.split() for switch in FASTER):
            return f"with {' '.join(FASTER)}, {GAIN}: {BUILD}"
        if "avx512f" not in cpu:
            return CLANG
    return "none known"


def cpu_info() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the last core; empty on systems other than Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def read_cpu_flags() -> set[str]:
    return set(cpu_info().get("flags", "").split())


def describe_cpu() -> str:
    """Return the CPU's name and its widest vector extension, which determines the speed."""
    name = cpu_info().get("model name", platform.processor() or platform.machine())
    flags = read_cpu_flags()
    widest = next((text for flag, text in WIDEST.items() if flag in flags), "")
    return f"{name}, {widest}" if widest else name
