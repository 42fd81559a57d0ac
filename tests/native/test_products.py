"""native/products.cpp: from how many rows on ggml's tiled product is used."""

from __future__ import annotations

from pathlib import Path

import pytest
from native.kernels import Kernels, build, is_buildable

Q4_K, Q5_K, Q6_K = 12, 13, 14  # of ggml_type

NEEDS_HEADERS = pytest.mark.skipif(not is_buildable(), reason="the headers of ggml are not here")
pytestmark = [pytest.mark.slow, NEEDS_HEADERS]  # compiling takes half a minute


def has_plain_avx2() -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx2" in flags and not {"avx_vnni", "avx512_vnni"} & {*flags}


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize(("kind", "first"), [(Q6_K, 16), (Q4_K, 12), (Q5_K, 1)])
def test_tiled_product_begins_where_it_pays(kind, first, expert) -> None:
    if not has_plain_avx2():
        first = 1  # as ggml decides
    library = Kernels(build()).library
    library.uses_tiled.restype = bool
    found = [rows for rows in range(1, 40) if library.uses_tiled(kind, rows, expert)]
    assert found == [*range(first, 40)]


def test_all_products_are_ggmls_while_the_kernels_are_off() -> None:
    library = Kernels(build()).library
    library.test_kernels_enable(0)
    try:
        assert library.uses_tiled(Q6_K, 8, False)
    finally:
        library.test_kernels_enable(1)
