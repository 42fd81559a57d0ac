"""native/products.cpp: which rows of a matrix product go to ggml's tiled one; and
native/quantized.cpp, which computes some products itself.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import pytest
from native.kernels import Kernels, build, is_buildable, libraries

Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS = 8, 10, 11, 12, 13, 14, 23  # of ggml_type
ROWS = 80
SHAPE = (512, 1024)  # of the weights whose products are timed

NEEDS_HEADERS = pytest.mark.skipif(not is_buildable(), reason="the headers of ggml are not here")
pytestmark = [pytest.mark.slow, NEEDS_HEADERS]  # compiling takes half a minute


def has_plain_avx2() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return "avx2" in flags and not {"avx_vnni", "avx512f"} & {*flags}


def has_measured_cpu() -> bool:
    """Return whether the table of products.cpp is about this CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return has_plain_avx2() or "avx512_vnni" in flags


plain_avx2 = pytest.mark.skipif(not has_plain_avx2(), reason="ggml decides on this CPU")


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return Kernels(build()).library


def divide(
    library: ctypes.CDLL, kind: int, rows: int, *, expert: bool = False, batches: int = 1
) -> tuple[int, int]:
    """Return how many rows go to tiles, and how many to ggml's other product."""
    sizes = (ctypes.c_int * 2)()
    count = library.divide_product(kind, rows, batches, expert, sizes)
    tiled = -sizes[0] if count else 0
    if not expert and count:  # the rest of an expert's rows is not ggml's to compute
        assert sum(abs(size) for size in sizes[:count]) == rows
    return tiled, rows - tiled


@plain_avx2
@pytest.mark.parametrize(
    ("kind", "alone", "after"), [(Q6_K, 13, 7), (Q4_K, 11, 7), (Q5_K, 8, 6), (Q2_K, 12, 9)]
)
def test_rows_go_to_tiles_where_that_is_faster(library, kind, alone, after) -> None:
    for rows in range(1, ROWS):
        full = rows // 16 * 16
        least = after if full else alone
        expected = rows if rows - full >= least else full
        assert divide(library, kind, rows) == (expected, rows - expected)


@plain_avx2
def test_a_product_of_several_matrices_is_not_divided(library) -> None:
    assert divide(library, Q6_K, 17, batches=2) == (17, 0)
    assert divide(library, Q6_K, 12, batches=2) == (0, 12)


@plain_avx2
def test_types_without_tiles_are_passed_on_whole(library) -> None:
    assert divide(library, Q8_0, 17) == (0, 17)


def test_all_products_are_ggmls_while_the_kernels_are_off(library) -> None:
    library.test_kernels_enable(0)
    try:
        assert [divide(library, Q6_K, rows)[1] for rows in range(1, 33)] == [
            *range(1, 8),
            *[0] * 25,
        ]
    finally:
        library.test_kernels_enable(1)


# ------------------------------------------------------------------------ the installed library

POINTER = ctypes.c_void_p


def base() -> ctypes.CDLL:
    return ctypes.CDLL(str(libraries() / "libggml-base.so"))


@functools.cache
def make_weights(kind: int, rows: int, columns: int) -> np.ndarray:
    """Return random weights as the type stores them."""
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    library, importance = base(), np.ones(columns, np.float32)
    library.ggml_row_size.restype = ctypes.c_size_t
    library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
    stored = np.zeros(library.ggml_row_size(kind, columns) * rows, np.uint8)
    quantize = library.ggml_quantize_chunk
    quantize.argtypes = [ctypes.c_int, POINTER, POINTER, *[ctypes.c_int64] * 3, POINTER]
    numbers = (0, rows, columns)
    quantize(kind, values.ctypes.data, stored.ctypes.data, *numbers, importance.ctypes.data)
    return stored


class Product:
    """A product with weights of a type. With ``experts``, each token uses some of the matrices;
    without, the tokens are those of some sequences.
    """

    def __init__(
        self,
        kind: int,
        tokens: int,
        *,
        experts: int = 0,
        used: int = 1,
        sequences: int = 1,
        shape: tuple[int, int] = (96, 768),
        repacked: int = False,
    ) -> None:
        rng = np.random.default_rng(tokens)
        rows, columns = shape
        self.kind, self.sizes = kind, (columns, rows, max(experts, 1), tokens, used)
        self.sequences = sequences
        self.weights = make_weights(kind, max(experts, 1) * rows, columns)
        self.input = rng.standard_normal((tokens, columns), dtype=np.float32)
        order = np.argsort(rng.random((tokens, max(experts, 1))), -1)
        self.ids = np.ascontiguousarray(order[:, :used], np.int32)
        self.dense, self.repacked = not experts, repacked
        self.out = np.full((tokens, used, rows), np.nan, np.float32)

    def run(self, library: ctypes.CDLL, *, ours: bool, threads: int = 1) -> float:
        """Compute ``out`` with the installed library of ggml; return the time."""
        seconds = ctypes.c_double()
        library.run_product.argtypes = [
            *(ctypes.c_int, *[POINTER] * 5, *[ctypes.c_int] * 3, POINTER),
        ]
        library.run_product(
            *(self.kind, (ctypes.c_int64 * 6)(*self.sizes, self.sequences)),
            *(self.weights.ctypes.data, self.input.ctypes.data),
            *(None if self.dense else self.ids.ctypes.data, self.out.ctypes.data),
            *(threads, ours, self.repacked, ctypes.byref(seconds)),
        )
        return seconds.value

    def expected(self) -> np.ndarray:
        """Return the result in float64, from the weights as stored and the input as rounded."""
        columns, rows, experts, _, _ = self.sizes
        values = dequantize(self.kind, self.weights, experts * rows, columns)
        matrices = values.reshape(experts, rows, columns)
        return np.einsum("turc,tc->tur", matrices[self.ids], round_to_8_bits(self.input))


def dequantize(kind: int, stored: np.ndarray, rows: int, columns: int) -> np.ndarray:
    name = {Q2_K: "q2_K", Q3_K: "q3_K", Q4_K: "q4_K", Q5_K: "q5_K", Q6_K: "q6_K", IQ4_XS: "iq4_xs"}
    convert = getattr(base(), f"dequantize_row_{name[kind]}")
    convert.argtypes = [POINTER, POINTER, ctypes.c_int64]
    values = np.empty((rows, columns), np.float32)
    convert(stored.ctypes.data, values.ctypes.data, rows * columns)
    return values.astype(np.float64)


def round_to_8_bits(values: np.ndarray) -> np.ndarray:
    """Return the values as ggml's products have them: 8 bits and a scale for each 256."""
    blocks = values.reshape(*values.shape[:-1], -1, 256)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    inverse = np.float32(-127) / np.where(largest == 0, np.float32(1), largest)
    numbers = np.minimum(np.rint(inverse * blocks), 127)
    return (numbers * (1 / inverse).astype(np.float64)).reshape(values.shape)


@pytest.fixture
def linked() -> None:
    """Skip unless our kernels are in the installed library."""
    if not hasattr(ctypes.CDLL(str(libraries() / "libggml-cpu.so")), "cllm_tiled_rows"):
        pytest.skip("llama.cpp was built without native/")


OWN = [(Q4_K, True), (Q6_K, False)]
"""Types with products of our own, and whether llama.cpp repacks their weights."""


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize(("kind", "repacked"), OWN)
@pytest.mark.parametrize("shape", [(8, 256), (96, 768), (1096, 512)])
def test_own_products_agree_with_float64(library, kind, repacked, shape) -> None:
    for tokens in (*range(1, 20), 31, 32, 33, 48, 49, 70):
        product = Product(kind, tokens, shape=shape, repacked=repacked)
        product.input[0] = 0
        product.input[-1, ::2] *= -50
        product.run(library, ours=True, threads=1 + tokens % 3)
        expected = product.expected()
        assert np.abs(product.out - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize(("kind", "repacked"), OWN)
def test_bits_of_a_row_do_not_depend_on_other_rows_or_threads(library, kind, repacked) -> None:
    whole = Product(kind, 40, repacked=repacked)
    whole.run(library, ours=True, threads=2)
    if kind == Q6_K and "avx512f" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("ggml computes it on this CPU")
    for tokens in (1, 2, 5, 8, 11, 39):
        part = Product(kind, tokens, repacked=repacked)
        part.input[:] = whole.input[:tokens]
        part.run(library, ours=True, threads=1 + tokens % 3)
        np.testing.assert_array_equal(part.out, whole.out[:tokens])


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize(("kind", "repacked"), [*OWN, (Q5_K, False)])
def test_sequences_become_rows_of_one_product(library, kind, repacked, ours) -> None:
    whole = Product(kind, 12, repacked=repacked)
    whole.run(library, ours=ours, threads=2)
    for sequences in (2, 12):
        product = Product(kind, 12, sequences=sequences, repacked=repacked)
        product.run(library, ours=ours, threads=2)
        np.testing.assert_array_equal(product.out, whole.out)


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("kind", [Q4_K, Q6_K])
def test_weights_in_an_unknown_order_are_left_to_ggml(library, kind) -> None:
    """Such as those in the buffers of AMX, whose products were NaN."""
    product = Product(kind, 5, repacked=-1)
    product.run(library, ours=False)
    expected = product.out.copy()
    product.run(library, ours=True)
    assert (product.out == expected).all()


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize(("kind", "repacked"), OWN)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_reach_their_own_row_only(
    library, kind, repacked, broken
) -> None:
    product = Product(kind, 5, repacked=repacked)
    product.input[3, 300] = broken
    product.run(library, ours=True)
    is_finite = np.isfinite(product.out).all(-1).ravel()
    assert is_finite[[0, 1, 2, 4]].all()
    if kind == Q4_K:  # of Q6_K, ggml computes some products, and loses NaN
        assert not is_finite[3]


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("kind", [Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS])
@pytest.mark.parametrize("experts", [0, 3])
def test_products_agree_with_float64(library, kind, experts, ours) -> None:
    for tokens in (1, 7, 8, 13, 16, 17, 22, 33, 40):
        product = Product(kind, tokens, experts=experts, used=2 if experts else 1)
        product.run(library, ours=ours, threads=1 + tokens % 3)
        expected = product.expected()
        assert np.abs(product.out - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.usefixtures("linked")
@pytest.mark.parametrize(
    ("kind", "experts", "repacked"),
    [
        *((kind, experts, False) for kind in (Q4_K, Q6_K) for experts in (0, 1)),
        (Q4_K, 0, True),
    ],
)
def test_one_more_row_takes_no_more_than_its_share(library, kind, experts, repacked) -> None:
    """In CPU time of one thread. Numbers of rows are compared in pairs that are computed one right
    after the other, because other programs on the machine slow down both alike; of many such
    pairs, the median counts.
    """
    if not (repacked or has_measured_cpu()):
        pytest.skip("ggml decides on this CPU")
    counts = range(1 if repacked else 4, 37)
    products = [Product(kind, n, experts=experts, shape=SHAPE, repacked=repacked) for n in counts]
    seconds: list[list[float]] = []  # by round and number of rows

    def find_too_long() -> list[tuple[int, float]]:
        """Return the numbers of rows that take too long, with their time per row in relation to
        that of one row less.
        """
        times = np.array(seconds) / counts
        ratios = np.median(times[:, 1:] / times[:, :-1], axis=0)
        return [(n, ratio) for n, ratio in zip(counts[1:], ratios, strict=True) if ratio > 1.2]

    while len(seconds) < 20 or (find_too_long() and len(seconds) < 500):
        seconds.append([product.run(library, ours=True) for product in products])
    assert find_too_long() == []
