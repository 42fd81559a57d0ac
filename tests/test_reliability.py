"""The measurements of docs/reliability.md, with fewer requests. Times are printed but not judged
here, because the machine may be busy.
"""

import asyncio
import sys

import pytest

from benchmarks.reliability.measures import list_measures
from benchmarks.reliability.soak import measure_soak

SCALE = 0.01
MEASURES = list_measures(SCALE)
NEED_MODEL = {"kill", "overload", "flips", "hostile"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the measurements read /proc"),
]


def check(figures):
    for figure in figures:
        print(f"{figure.promise}: {figure.measured} (target {figure.target})")  # noqa: T201
        assert figure.is_met or figure.is_timed, figure


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.llama) if name in NEED_MODEL else name
        for name in MEASURES
    ],
)
def test_promise_is_kept(name):
    async def measure():
        return await MEASURES[name]()

    check(asyncio.run(measure()))


def test_soak_of_a_minute():
    check(asyncio.run(measure_soak(1.0)))
