"""The measurements of docs/reliability.md, with fewer requests. Times are printed but not judged
here, because the machine may be busy.
"""

import asyncio
import sys

import pytest
from conftest import repeat

from benchmarks.reliability.measures import list_measures
from benchmarks.reliability.soak import measure_soak

SCALE = repeat(10, 3) / 1000
MEASURES = list_measures(SCALE)
MARKS = {
    **dict.fromkeys(("kill", "overload", "flips", "hostile"), pytest.mark.llama),
    "hang": pytest.mark.full,  # waits for half a minute
}

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
    [pytest.param(name, marks=MARKS.get(name, ())) for name in MEASURES],
)
def test_promise_is_kept(name):
    async def measure():
        return await MEASURES[name]()

    check(asyncio.run(measure()))


def test_soak():
    check(asyncio.run(measure_soak(repeat(60, 10) / 60)))
