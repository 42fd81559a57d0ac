"""Random attention operations, and a program that runs them beside pages that cannot be touched:

PYTHONPATH=tests python -m native.cases LIBRARY FIRST_SEED COUNT
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import numpy as np
from native.kernels import Case, Kernels, store

SIZES = (16, 32, 64, 80, 96, 112, 128, 192, 256)
KINDS = ("f16", "bf16", "f32", "q8_0")
MASKS = ("none", "causal", "window", "ragged", "sparse", "biases")


def random_case(seed: int) -> Case:
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    key_size, k_type = pick(*SIZES), pick(*KINDS)
    value_size = pick(key_size, *SIZES)
    v_type = pick(k_type, *KINDS)
    k_type, v_type = (
        "f16" if kind == "q8_0" and size % 32 else kind
        for kind, size in ((k_type, key_size), (v_type, value_size))
    )
    kv_heads, group = pick(1, 2, 3, 8), pick(1, 1, 2, 2, 3, 4, 5, 7, 8, 16)
    streams, tokens = pick(1, 1, 2, 3, 9), pick(1, 1, 1, 2, 3, 11, 33, 70)
    positions = pick(1, 5, 63, 64, 65, 200, 256, 320, 511, 640, 1100)
    heads = kv_heads * group
    q = cells(rng, streams, tokens, heads, key_size, "f32", scale=pick(0.1, 1, 4))
    k = cells(rng, streams, positions, kv_heads, key_size, k_type)
    v = cells(rng, streams, positions, kv_heads, value_size, v_type)
    mask = random_mask(rng, pick(*MASKS), streams, tokens, positions)
    return Case(
        *(q, k, v, k_type, v_type, mask),
        sinks=rng.standard_normal(heads).astype(np.float32) if pick(0, 0, 1) else None,
        scale=key_size**-0.5,
        bias=pick(0, 0, 8.0) if mask is not None else 0.0,
        cap=pick(0, 0, 5.0, 50.0),
    )


def cells(rng, streams, rows, heads, size, kind, *, scale=1.0) -> np.ndarray:
    """Return (streams, heads, rows, size) in one of the layouts that llama.cpp uses."""
    values = rng.standard_normal((streams, rows, heads, size)) * scale
    layout = rng.integers(3)
    if layout == 0:  # one head after the other
        return store(values.transpose(0, 2, 1, 3), kind)
    stored = store(values, kind)
    if layout == 1:  # with a gap after each row, as in a view of a larger tensor
        unit = 34 if kind == "q8_0" else 8
        wide = np.zeros((*stored.shape[:-1], stored.shape[-1] + unit), stored.dtype)
        wide[..., : stored.shape[-1]] = stored
        stored = wide[..., : stored.shape[-1]]
    return stored.transpose(0, 2, 1, 3)


def random_mask(rng, form, streams, tokens, positions) -> np.ndarray | None:
    if form == "none":
        return None
    at = np.arange(positions)[None, None]
    last = positions - tokens + np.arange(tokens)[None, :, None]
    if form == "biases":
        return rng.standard_normal((streams, tokens, positions)).astype(np.float16)
    if form == "causal":
        seen = np.broadcast_to(at <= last, (streams, tokens, positions))
    elif form == "window":
        seen = np.broadcast_to((at <= last) & (at > last - 40), (streams, tokens, positions))
    elif form == "ragged":  # each stream has another length; some tokens see nothing
        lengths = rng.integers(0, positions + 1, streams)[:, None, None]
        seen = (at < lengths) & (at <= last)
    else:
        seen = rng.random((streams, tokens, positions)) < 0.1
        seen &= rng.random((1, 1, (positions + 63) // 64)).repeat(64, 2)[..., :positions] < 0.5
    return np.where(seen, 0, -np.inf).astype(np.float16)


def part_of(case: Case, stream: int, tokens: slice, kv_heads: slice, padding: int) -> Case:
    """Return an operation of some tokens of one stream and of the query heads of some KV heads, with
    ``padding`` more positions that they do not see."""
    group = case.q.shape[1] // case.k.shape[1]
    heads = slice(kv_heads.start * group, kv_heads.stop * group)
    rng = np.random.default_rng(padding)
    cells = {}
    for name, kind in (("k", case.k_type), ("v", case.v_type)):
        seen = getattr(case, name)[stream, kv_heads]
        size = case.value_size if name == "v" else case.q.shape[-1]
        unseen = store(rng.standard_normal((len(seen), 600, size)), kind)
        cells[name] = np.concatenate([seen, unseen[:, :padding]], 1)[None]
    mask = case.mask
    if mask is not None:
        mask = np.pad(mask[stream, tokens], ((0, 0), (0, padding)), constant_values=-np.inf)[None]
    return Case(
        case.q[stream, heads, tokens].copy()[None],
        *(cells["k"], cells["v"], case.k_type, case.v_type, mask),
        sinks=None if case.sinks is None else case.sinks[heads].copy(),
        scale=case.scale,
        bias=case.bias,
        cap=case.cap,
    )


# ------------------------------------------------------------------------------ guard pages


def guarded(array: np.ndarray, *, at_end: bool) -> np.ndarray:
    """Return a copy with the same strides, which touches a page that cannot be read or written."""
    page = mmap.PAGESIZE
    size = (
        sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + array.itemsize
    )
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (base, base + (pages + 1) * page):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
    offset = page + (pages * page - size if at_end else 0)
    copy = np.ndarray(array.shape, array.dtype, memory, offset, array.strides)
    copy[...] = array
    return copy


def main() -> None:
    file, first, count = sys.argv[1:]
    kernels = Kernels(Path(file))
    for seed in range(int(first), int(first) + int(count)):
        case = random_case(seed)
        for name in case.arrays():
            setattr(case, name, guarded(getattr(case, name), at_end=seed % 2 == 0))
        kernels.run(case, threads=1 + seed % 3, work=(seed % 5) << 18)
        assert np.isfinite(case.out).all()


if __name__ == "__main__":
    main()
