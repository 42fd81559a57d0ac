"""What processes get from the system: environment variables and CPUs."""

from __future__ import annotations

import os

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


def count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
