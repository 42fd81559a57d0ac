"""The page that Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from cllm.core.output import TOTALS, Stats
from cllm.observe.metrics import COUNTERS, GAUGES, Metrics, render

NAMES = [name for name, _ in COUNTERS.values()]


def read(page: bytes) -> dict[str, tuple[str, float]]:
    """Return the type and the value of each metric with one sample, by its name without "cllm:"."""
    families = text_string_to_metric_families(page.decode())
    return {
        family.name.removeprefix("cllm:"): (family.type, family.samples[0].value)
        for family in families
        if len(family.samples) == 1
    }


def test_totals_are_rendered_as_counters() -> None:
    """Their names have the suffix _total, and rendering the page repeatedly does not change the
    values.
    """
    metrics = Metrics("m")
    for factor in (1, 1, 3):
        stats = Stats(**{field: factor * i for i, field in enumerate(COUNTERS, start=1)})
        page = render([metrics.update(stats, ready=True, num_restarts=factor, reservations={})])
    found = read(page)
    assert [found[name] for name in NAMES] == [
        ("counter", 3.0 * i) for i in range(1, len(NAMES) + 1)
    ]
    assert found["engine_restarts"] == ("counter", 3.0)
    for name in [*NAMES, "engine_restarts"]:
        assert f'cllm:{name}_total{{model_name="m"}}'.encode() in page


def test_every_total_is_a_counter_and_not_a_gauge() -> None:
    assert {*COUNTERS} == {*TOTALS}
    assert not {*GAUGES} & {*TOTALS}
