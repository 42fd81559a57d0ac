"""Quantizes a GGUF file with llama.cpp, in a separate process.

The C function cannot be interrupted, and a failed assertion in it aborts the process, so it runs in
a child that can be killed. The child writes a line ``i n`` to stdout for each tensor, and the
reason for a failure to stderr.
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cllm.errors import StartupError
from cllm.models.gguf import TENSOR_TYPES, GgufHeader, read_header

TENSOR_LINE = re.compile(rb"\[ *(\d+)/ *(\d+)\]")


def quantize(
    source: Path,
    target: Path,
    body: str | None,
    *,
    head: str | None = None,
    threads: int | None,
    progress: Callable[[float], None],
) -> None:
    """Write ``source`` to ``target`` in the llama.cpp file type ``body``, such as ``Q4_K_M``.

    Without ``body``, all tensors except the head stay as they are. ``head`` is the type of the
    output head, such as ``Q6_K``; None takes the file type's default. A source that is already
    quantized loses quality a second time. ``threads`` None means one per core. ``progress``
    receives the share of tensors begun, 0 to 1. An interrupt kills the child and leaves ``target``
    incomplete. Raises StartupError with llama.cpp's reason.
    """
    job = json.dumps([str(source), str(target), body, head, threads or 0])
    command = [sys.executable, "-P", "-m", __name__, job]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
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
        types = " with head ".join(filter(None, (body, head)))
        raise StartupError(f"llama.cpp could not quantize to {types}: {reason}")


def head_name(header: GgufHeader) -> str:
    """Return the name of the tensor that computes logits: the output head, or the token embedding
    if there is none.
    """
    names = {tensor.name for tensor in header.tensors}
    return "output.weight" if "output.weight" in names else "token_embd.weight"


def _quantize_here(
    source: str, target: str, body: str | None, head: str | None, threads: int
) -> int:
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
    params.nthread = threads
    params.allow_requantize = True
    if head is not None:
        own = head_name(read_header(Path(source))) == "output.weight"
        setattr(
            params,
            "output_tensor_type" if own else "token_embedding_type",
            getattr(lib, f"GGML_TYPE_{head}"),
        )
    if body is not None:
        prefix = "ALL" if body == "F32" else "MOSTLY"
        params.ftype = getattr(lib, f"LLAMA_FTYPE_{prefix}_{body}")
    else:
        header = read_header(Path(source))
        params.ftype = header.metadata.get("general.file_type", lib.LLAMA_FTYPE_MOSTLY_Q8_0)
        params.tt_overrides = _as_they_are(header, lib)
    return int(lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))


def _as_they_are(header: GgufHeader, lib: Any) -> Any:
    """Return llama.cpp's list of name patterns and types, ended by NULL, that keeps all types.

    llama.cpp copies a tensor that already has its target type.
    """
    kinds = {name: kind for kind, (name, _, _) in TENSOR_TYPES.items()}
    overrides = (lib.llama_model_tensor_override * (len(header.tensors) + 1))()
    for override, tensor in zip(overrides, header.tensors, strict=False):
        override.pattern, override.type = f"^{re.escape(tensor.name)}$".encode(), kinds[tensor.type]
    return overrides


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_quantize_here(*json.loads(sys.argv[1])))
