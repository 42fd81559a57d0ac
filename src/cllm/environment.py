"""The environment of processes: environment variables, control groups and CPUs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")

# Variables that locate programs, libraries, modules and files, and that set the language and the
# time zone.
NAMES = {
    *(
        "PATH",
        "PATHEXT",
        "HOME",
        "USER",
        "TMPDIR",
        "TEMP",
        "TMP",
        "LANG",
        "LANGUAGE",
        "TZ",
        "GLIBC_TUNABLES",
    ),
    *(
        "SYSTEMROOT",
        "SYSTEMDRIVE",
        "WINDIR",
        "COMSPEC",
        "USERPROFILE",
        "APPDATA",
        "LOCALAPPDATA",
        "PROGRAMDATA",
    ),
    *("NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE"),
}
# Variables that configure the interpreter, the loader, the memory allocator, threads and GPUs.
PREFIXES = (
    *("LC_", "PYTHON", "LD_", "DYLD_", "MALLOC_", "XDG_", "GGML_", "LLAMA_"),
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "BLIS_", "VECLIB_"),
    *(
        "CUDA_",
        "CUBLAS_",
        "NVIDIA_",
        "HIP_",
        "HSA_",
        "ROCR_",
        "ROCM_",
        "ROCBLAS_",
        "AMD_",
        "GPU_",
        "VK_",
        "MESA_",
    ),
    *("MTL_", "METAL_", "SYCL_", "ONEAPI_", "ZE_", "OCL_", "OPENCL_", "MUSA_", "ASCEND_"),
)
# also with a prefix from above, such as LLAMA_API_KEY
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def child_environment() -> dict[str, str]:
    """Return the environment variables that a child process needs, without secrets.

    Children process input from clients. A fault in a child must not reveal a secret that only its
    parent needs.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (name in NAMES or name.startswith(PREFIXES))
        and not any(word in name for word in SECRETS)
    }


class MemoryUse(NamedTuple):
    """Memory of ``num_bytes`` (at least 1), of which ``num_used`` are used."""

    num_used: int
    num_bytes: int

    @property
    def share(self) -> float:
        return self.num_used / self.num_bytes


class ControlGroup(NamedTuple):
    """A control group: the folder with its files, whose names depend on the version, 1 or 2."""

    folder: Path
    version: int


def list_control_groups(controller: str) -> list[ControlGroup]:
    """Return where the control groups of this process and those above them may have their files for
    ``controller``, such as memory. Not all of these folders exist.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root, version = (CGROUPS / controller, 1) if controllers else (CGROUPS, 2)
        # A container may see its group as the root; then the folders below do not exist.
        own = PurePosixPath(path.lstrip("/"))
        groups += [ControlGroup(root / each, version) for each in (own, *own.parents)]
    return groups


def read_cpu_quota() -> float | None:
    """Return the CPUs' worth of time that this process's control groups allow; None if they set no
    limit.
    """
    quotas = []
    for folder, version in list_control_groups("cpu"):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text()
                period = (folder / "cpu.cfs_period_us").read_text()
            if quota != "max" and int(quota) > 0 and int(period) > 0:  # version 1: -1 is no limit
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def count_own_cpus() -> int:
    """Return the number of CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def count_cpus() -> int:
    """Return the number of CPUs that this process may use all the time.

    Of a quota of 3.5 CPUs, it is 3: with 4 threads, the system would stop all of them for an eighth
    of each tenth of a second.
    """
    quota = read_cpu_quota()
    num_cpus = count_own_cpus()
    return num_cpus if quota is None else max(1, min(num_cpus, int(quota)))
