"""What child processes get of our environment."""

from __future__ import annotations

import os

# What finds programs, libraries, modules and files, and says the language and the time zone.
NAMES = {
    *("PATH", "PATHEXT", "HOME", "USER", "TMPDIR", "TEMP", "TMP", "LANG", "LANGUAGE", "TZ", "GLIBC_TUNABLES"),
    *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "USERPROFILE", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA"),
    *("NUMBER_OF_PROCESSORS", "PROCESSOR_ARCHITECTURE"),
}
# What sets up the interpreter, the loader, the memory allocator, threads and GPUs.
PREFIXES = (
    *("LC_", "PYTHON", "LD_", "DYLD_", "MALLOC_", "XDG_", "GGML_", "LLAMA_"),
    *("OMP_", "GOMP_", "KMP_", "OPENBLAS_", "MKL_", "BLIS_", "VECLIB_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ROCBLAS_", "AMD_", "GPU_", "VK_", "MESA_"),
    *("MTL_", "METAL_", "SYCL_", "ONEAPI_", "ZE_", "OCL_", "OPENCL_", "MUSA_", "ASCEND_"),
)
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")  # LLAMA_API_KEY has a prefix of the above, too


def child_environment() -> dict[str, str]:
    """What a child process needs of our environment, without secrets.

    Children work on what clients send. A fault in one of them must not give away a token that only we need.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if (name in NAMES or name.startswith(PREFIXES)) and not any(word in name for word in SECRETS)
    }
