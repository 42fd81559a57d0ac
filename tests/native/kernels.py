"""Compiles native/ with a harness into a small library, and calls it with numpy arrays."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
F32, F16, Q8_0, I32, BF16 = 0, 1, 8, 26, 30  # of ggml_type
TYPES = {"f32": F32, "f16": F16, "q8_0": Q8_0, "bf16": BF16}
RENAMED = {
    "ggml_compute_forward_flash_attn_ext": "test_attention",
    "ggml_original_flash_attn_ext": "test_fallback",
    "ggml_barrier": "test_barrier",
    "ggml_threadpool_chunk_set": "test_chunk_set",
    "ggml_threadpool_chunk_add": "test_chunk_add",
    "ggml_compute_forward_mul_mat_tiled": "test_mul_mat_tiled",
    "ggml_compute_forward_mul_mat_id_tiled": "test_mul_mat_id_tiled",
    "ggml_compute_forward_mul_mat": "test_mul_mat",
    "ggml_cpu_extra_compute_forward": "test_extra",
    "ggml_original_extra_compute_forward": "test_original_extra",
    "ggml_original_mul_mat_tiled": "test_original_tiled",
    "ggml_original_mul_mat_id_tiled": "test_original_id_tiled",
    "cllm_kernels_enable": "test_kernels_enable",
    "cllm_kernels": "test_kernels",
}


class Spec(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


@functools.cache
def find_headers() -> Path | None:
    """Return the folder of ggml's sources in llama-cpp-python's source package, if it is there."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        return None
    found: list[Path] = []
    if uv := shutil.which("uv") or shutil.which(ROOT / ".tools" / "bin" / "uv"):
        answer = subprocess.run([uv, "cache", "dir"], capture_output=True, text=True, check=False)
        cache = Path(answer.stdout.strip())
        version = importlib.metadata.version("llama-cpp-python").partition("+")[0]
        package = f"sdists-v*/pypi/llama-cpp-python/{version}"
        found += cache.glob(f"{package}/*/src/vendor/llama.cpp/ggml")
    found += ROOT.glob(".tools/wheels/llama_cpp_python-*/vendor/llama.cpp/ggml")
    complete = (each for each in found if (each / "src" / "ggml-cpu" / "ggml-cpu-impl.h").exists())
    return next(complete, None)


def is_buildable() -> bool:
    """Return whether the library can be compiled here."""
    return sys.platform == "linux" and find_headers() is not None


def libraries() -> Path:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def build(*switches: str) -> Path:
    """Return the compiled library. It is made again only if something has changed."""
    ggml = find_headers()
    assert ggml is not None
    native = ROOT / "native"
    sources = [*sorted(native.glob("*.cpp")), Path(__file__).with_name("harness.cpp")]
    definitions = [f"-D{name}={other}" for name, other in RENAMED.items()]
    include = [f"-I{ggml / each}" for each in ("include", "src", "src/ggml-cpu")]
    lib = libraries()
    command = [
        *(
            os.environ.get("CXX", "c++"),
            "-std=c++17",
            "-O3",
            "-march=native",
            "-ffp-contract=off",
            "-fPIC",
            "-shared",
        ),
        *(
            "-Wall",
            "-Wextra",
            "-Wno-unused-function",
            "-pthread",
            *switches,
            *definitions,
            *include,
        ),
        *map(str, sources),
        *(f"-L{lib}", f"-Wl,-rpath,{lib}", "-lggml-cpu", "-lggml-base", "-ldl"),
    ]
    files = [*sorted(native.glob("*.h")), *sources]
    text = " ".join(command).encode() + b"".join(file.read_bytes() for file in files)
    out = ROOT / ".tools" / "native" / f"kernels-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-o", str(part)], check=True)
        part.replace(out)
    return out


@dataclass
class Case:
    """One operation. Arrays: q (streams, heads, tokens, size) in float32; k and v (streams,
    KV heads, positions, size) as stored; mask (streams, tokens, positions) in float16."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_type: str = "f16"
    v_type: str = "f16"
    mask: np.ndarray | None = None
    sinks: np.ndarray | None = None
    scale: float = 1.0
    bias: float = 0.0
    cap: float = 0.0
    out: np.ndarray = field(init=False)

    @property
    def value_size(self) -> int:
        return self.v.shape[-1] // 34 * 32 if self.v_type == "q8_0" else self.v.shape[-1]

    def __post_init__(self) -> None:
        streams, heads, tokens, _ = self.q.shape
        self.out = np.full((streams, tokens, heads, self.value_size), np.nan, np.float32)

    def arrays(self) -> list[str]:
        return [
            name
            for name in ("q", "k", "v", "mask", "sinks", "out")
            if getattr(self, name) is not None
        ]

    def specs(self) -> ctypes.Array[Spec]:
        return (Spec * 6)(
            tensor(self.q, F32),
            tensor(self.k, TYPES[self.k_type]),
            tensor(self.v, TYPES[self.v_type]),
            Spec() if self.mask is None else tensor(self.mask[:, None], F16),
            Spec() if self.sinks is None else tensor(self.sinks, F32),
            tensor(self.out, F32),
        )


def tensor(array: np.ndarray, kind: int) -> Spec:
    """Return the description of an array whose last axis is ggml's first."""
    shape = [*(1,) * (4 - array.ndim), *array.shape]
    strides = [*(array.nbytes,) * (4 - array.ndim), *array.strides]
    if kind == Q8_0:
        shape[-1] = shape[-1] // 34 * 32
        strides[-1] = 34
    return Spec(
        array.ctypes.data,
        kind,
        (ctypes.c_int64 * 4)(*shape[::-1]),
        (ctypes.c_size_t * 4)(*strides[::-1]),
    )


class Kernels:
    """The compiled library."""

    def __init__(self, file: Path) -> None:
        ctypes.CDLL(str(libraries() / "libggml-base.so"))
        self.library = ctypes.CDLL(str(file))
        self.library.work_size.restype = ctypes.c_size_t
        self.library.run_kernel.argtypes = [
            *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t),
            *(ctypes.c_int, ctypes.c_void_p),
        ]

    def run(
        self, case: Case, threads: int = 1, *, ggml: bool = False, repeat: int = 1, work: int = 0
    ) -> float:
        """Compute ``case.out``; return the shortest time. ``work``: bytes of work memory beyond
        what ggml has for the operation."""
        seconds = ctypes.c_double()
        params = (ctypes.c_float * 3)(case.scale, case.bias, case.cap)
        specs = case.specs()
        if ggml:
            self.library.run_ggml(specs, params, threads, repeat, ctypes.byref(seconds))
            return seconds.value
        size = self.library.work_size(case.q.shape[-1], case.value_size, case.q.shape[1], threads)
        passed_on = self.library.run_kernel(
            specs, params, threads, size + work, repeat, ctypes.byref(seconds)
        )
        assert not passed_on
        return seconds.value


# ------------------------------------------------------------------------------ numpy


def store(values: np.ndarray, kind: str) -> np.ndarray:
    """Return the values as the type has them."""
    values = np.ascontiguousarray(values, np.float32)
    if kind == "f32":
        return values
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    blocks = values.reshape(*values.shape[:-1], -1, 32)
    scale = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16)
    divisor = np.where(scale == 0, 1, scale).astype(np.float32)
    numbers = np.clip(np.round(blocks / divisor), -127, 127).astype(np.int8)
    stored = np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], -1)
    return stored.reshape(*values.shape[:-1], -1)


def load(stored: np.ndarray, kind: str) -> np.ndarray:
    """Return stored values in float64."""
    if kind == "bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if kind != "q8_0":
        return stored.astype(np.float64)
    blocks = np.ascontiguousarray(stored).reshape(*stored.shape[:-1], -1, 34)
    scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float64)
    numbers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return (scale * numbers).reshape(*stored.shape[:-1], -1)


def slopes(heads: int, bias: float) -> np.ndarray:
    """Return ALiBi's slope for each head."""
    if bias <= 0:
        return np.ones(heads)
    powers = 2 ** int(np.floor(np.log2(heads)))
    first = 2.0 ** (-bias / powers) ** 1
    second = 2.0 ** (-bias / 2 / powers)
    return np.array(
        [first ** (h + 1) if h < powers else second ** (2 * (h - powers) + 1) for h in range(heads)]
    )


def reference(case: Case) -> np.ndarray:
    """Return the result in float64, shaped as ``case.out``."""
    q = case.q.astype(np.float64)
    streams, heads, _, _ = q.shape
    k, v = load(case.k, case.k_type), load(case.v, case.v_type)
    group = heads // k.shape[1]
    k = np.repeat(np.repeat(k, group, 1), streams // k.shape[0], 0)
    v = np.repeat(np.repeat(v, group, 1), streams // v.shape[0], 0)
    scores = np.einsum("shtd,shpd->shtp", q, k) * np.float32(case.scale).astype(np.float64)
    if case.cap:
        scores = case.cap * np.tanh(scores / case.cap)
    if case.mask is not None:
        mask = case.mask[np.arange(streams) % case.mask.shape[0]].astype(np.float64)
        scores += slopes(heads, case.bias)[None, :, None, None] * mask[:, None]
    top = scores.max(-1, keepdims=True)
    if case.sinks is not None:
        top = np.maximum(top, case.sinks.astype(np.float64)[None, :, None, None])
    top = np.where(np.isinf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if case.sinks is not None:
        total += np.exp(case.sinks.astype(np.float64)[None, :, None, None] - top)
    out = np.einsum("shtp,shpd->shtd", weights, v) / np.where(total == 0, 1, total)
    return out.transpose(0, 2, 1, 3)
