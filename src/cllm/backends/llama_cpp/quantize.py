"""llama.cpp's quantization of a GGUF file, in a process of its own.

The C function can neither be interrupted nor survive its own assertions, so the caller gets a child that can be killed.
The child writes a line ``i n`` on stdout for each tensor, and the reason of a failure on stderr.
"""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cllm.errors import StartupError

TENSOR_LINE = re.compile(rb"\[ *(\d+)/ *(\d+)\]")


def quantize(
    source: Path, target: Path, type_name: str, *, threads: int | None, progress: Callable[[float], None]
) -> None:
    """Write ``source`` (F16 or F32) as ``target`` in the llama.cpp file type ``type_name``, such as ``Q4_K_M``.

    threads: None for one a core. ``progress`` gets the share of tensors begun, 0 to 1. An interrupt ends the work;
    ``target`` is then incomplete. Raises StartupError with llama.cpp's reason.
    """
    command = [sys.executable, "-P", "-m", __name__, str(source), str(target), type_name, str(threads or 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            for line in child.stdout or ():
                done, total = line.split()
                progress(int(done) / int(total))
            errors = child.stderr.read().strip().splitlines() if child.stderr else []
        except BaseException:
            child.kill()
            raise
    if child.returncode != 0:
        reason = errors[-1] if errors else f"the process ended with {child.returncode}"
        raise StartupError(f"llama.cpp could not quantize to {type_name}: {reason}")


def _quantize_here(source: str, target: str, type_name: str, threads: str) -> int:
    from llama_cpp import llama_cpp as lib

    from cllm.backends.llama_cpp.library import LOG_LEVEL_ERROR

    @lib.llama_log_callback  # type: ignore[untyped-decorator]
    def on_log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
        if match := TENSOR_LINE.match(text):
            sys.stdout.write(f"{int(match[1])} {int(match[2])}\n")
            sys.stdout.flush()
        elif level == LOG_LEVEL_ERROR:
            sys.stderr.write(text.decode("utf-8", "replace"))

    lib.llama_log_set(on_log, ctypes.c_void_p(0))
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{type_name}")
    params.nthread = int(threads)
    return int(lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_quantize_here(*sys.argv[1:]))
