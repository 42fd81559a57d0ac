"""native/attention.cpp, compared with float64."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from native.cases import guarded, part_of, random_case
from native.kernels import ROOT, Case, Kernels, reference, store

from native import kernels as native

NEEDS_HEADERS = pytest.mark.skipif(
    not native.is_buildable(),
    reason="the headers of ggml are not here: uv's cache has no source package of llama.cpp",
)
pytestmark = [pytest.mark.slow, NEEDS_HEADERS]  # compiling takes half a minute
ROUNDING = 4e-6  # of the largest value: what float32 costs whatever the order of its sums


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    return Kernels(native.build())


def error(case: Case, expected: np.ndarray) -> float:
    """Return the largest difference, as a part of the largest value."""
    return float(np.abs(case.out - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.mark.parametrize("seed", range(120))
def test_result_is_as_exact_as_float32_and_at_least_as_ggml(kernels, seed) -> None:
    case, threads = random_case(seed), 1 + seed % 3
    expected = reference(case)
    kernels.run(case, threads)
    ours = error(case, expected)
    kernels.run(case, threads, ggml=True)
    assert ours <= max(error(case, expected), ROUNDING)
    assert ours <= 1e-5


@pytest.mark.parametrize("seed", range(0, 120, 6))
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_result_is_bit_identical_in_every_run(kernels, seed, threads) -> None:
    case = random_case(seed)
    kernels.run(case, threads, work=1 << 20)
    first = case.out.copy()
    for _ in range(3):
        case.out[:] = np.nan
        kernels.run(case, threads, work=1 << 20)
        assert case.out.tobytes() == first.tobytes()


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_computed_alike_whatever_shares_the_operation(kernels, seed) -> None:
    """Neither tokens, streams and heads beside them, nor threads, memory or padding change a bit."""
    case, rng = random_case(seed), np.random.default_rng(seed)
    kernels.run(case, threads=1 + seed % 3, work=seed % 2 << 22)
    streams, heads, tokens, _ = case.q.shape
    kv_heads = case.k.shape[1]
    for number in range(4):
        stream, first = rng.integers(streams), rng.integers(tokens)
        end = first + 1 if number < 2 else rng.integers(first, tokens) + 1
        one = rng.integers(kv_heads)
        some = slice(one, one + 1) if number % 2 and not case.bias else slice(0, kv_heads)
        padding = 0 if case.mask is None else int(rng.integers(600))
        part = part_of(case, stream, slice(first, end), some, padding)
        kernels.run(part, int(rng.integers(1, 6)), work=int(rng.integers(3)) << 20)
        group = heads // kv_heads
        expected = case.out[stream, first:end, some.start * group : some.stop * group]
        assert part.out[0].tobytes() == expected.tobytes()


def simple_case(positions: int = 256, tokens: int = 1, streams: int = 1, group: int = 2) -> Case:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((streams, 2 * group, tokens, 64), dtype=np.float32)
    k, v = (
        store(rng.standard_normal((streams, 2, positions, 64), dtype=np.float32), "f16")
        for _ in range(2)
    )
    mask = np.zeros((streams, tokens, positions), np.float16)
    return Case(q, k, v, mask=mask, scale=0.125)


@pytest.mark.parametrize("tokens", [1, 11])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_values_that_nobody_may_see_do_no_harm(kernels, tokens, broken) -> None:
    case = simple_case(tokens=tokens)
    case.mask[..., 70:] = -np.inf
    case.mask[:, 0, 10:20] = -np.inf
    expected = reference(case)
    case.k[:, :, 70:] = case.v[:, :, 70:] = broken
    kernels.run(case)
    assert error(case, expected) <= ROUNDING


def test_broken_position_breaks_only_tokens_that_see_it(kernels) -> None:
    case = simple_case(tokens=11)
    case.mask[:, :5, 20] = -np.inf
    expected = reference(case)
    case.v[:, :, 20] = np.inf
    kernels.run(case)
    assert np.abs(case.out[:, :5] - expected[:, :5]).max() < 1e-5
    assert not np.isfinite(case.out[:, 5:]).any()


def test_broken_position_that_all_see_costs_no_time(kernels) -> None:
    """A model whose values exceed float16 must not stall those of others."""
    seconds = []
    for broken in (0.0, np.inf):
        case = simple_case(tokens=64, positions=4096)
        case.v[:, :, 0] = broken
        before = time.process_time()
        kernels.run(case)
        seconds.append(time.process_time() - before)
        assert np.isfinite(case.out).all() == (broken == 0)
    assert seconds[1] < 3 * seconds[0] + 0.05


@pytest.mark.parametrize("tokens", [1, 40])
def test_masked_tiles_are_not_read(kernels, tokens) -> None:
    """A tile that is read would cost time; here it would be a page that cannot be read."""
    case = simple_case(positions=64, tokens=tokens)
    expected = reference(case)
    longer = 64 * 1000
    for name in ("k", "v"):
        array = getattr(case, name)
        setattr(
            case, name, np.lib.stride_tricks.as_strided(array, (1, 2, longer, 64), array.strides)
        )
    case.mask = np.full((1, tokens, longer), -np.inf, np.float16)
    case.mask[..., :64] = 0
    case.out[:] = np.nan
    kernels.run(case, 2)
    assert error(case, expected) <= ROUNDING


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("length", [1, 30, 64, 65])
def test_cells_after_the_last_one_seen_are_not_read(kernels, tokens, length) -> None:
    """Cells that were never written take no memory until they are read."""
    case = simple_case(positions=length, tokens=tokens)
    expected = reference(case)
    for name in ("k", "v"):  # another head of the same token must not follow the last cell
        array = np.ascontiguousarray(getattr(case, name)[:, :1])
        array = guarded(array, at_end=True)
        setattr(case, name, np.lib.stride_tricks.as_strided(array, (1, 1, 256, 64), array.strides))
    case.q = np.ascontiguousarray(case.q[:, :2])
    case.mask = np.full((1, tokens, 256), -np.inf, np.float16)
    case.mask[..., :length] = 0
    case.out = np.full((1, tokens, 2, 64), np.nan, np.float32)
    kernels.run(case)
    assert error(case, expected[:, :, :2]) <= ROUNDING


def test_streams_may_share_memory(kernels) -> None:
    case = simple_case(streams=8)
    case.k[:], case.v[:] = case.k[:1], case.v[:1]
    expected = reference(case)
    case.k, case.v = (np.broadcast_to(each[:1], each.shape) for each in (case.k, case.v))
    kernels.run(case, 2)
    assert error(case, expected) <= ROUNDING


def run_beside_guard_pages(library: Path, count: int, **variables: str) -> None:
    command = [sys.executable, "-m", "native.cases", str(library), "1000", str(count)]
    answer = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "tests"} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]


@pytest.mark.slow
def test_nothing_outside_the_tensors_is_touched() -> None:
    run_beside_guard_pages(native.build(), 150)


@pytest.mark.slow
def test_sanitizers_find_nothing() -> None:
    library = native.build("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g")
    runtime = subprocess.run(
        [os.environ.get("CXX", "c++"), "-print-file-name=libasan.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    run_beside_guard_pages(library, 40, LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
