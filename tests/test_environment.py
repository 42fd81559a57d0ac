"""What the system lets a process use."""

from __future__ import annotations

import pytest

from cllm import environment


def version_2(limit: str) -> dict[str, str]:
    return {"cpu.max": f"{limit}\n"}


def version_1(quota: int, period: int = 100_000) -> dict[str, str]:
    return {"cpu.cfs_quota_us": f"{quota}\n", "cpu.cfs_period_us": f"{period}\n"}


@pytest.mark.parametrize(
    ("own", "files", "quota", "cpus"),
    [
        ("0::/system.slice/cllm.service\n", {}, None, 16),
        ("0::/a\n", {"a": version_2("max 100000")}, None, 16),
        ("0::/\n", {"": version_2("200000 100000")}, 2, 2),
        ("0::/a\n", {"a": version_2("350000 100000")}, 3.5, 3),
        ("0::/a\n", {"a": version_2("50000 100000")}, 0.5, 1),
        ("0::/a\n", {"a": version_2("100000 50000")}, 2, 2),
        ("0::/a\n", {"a": version_2("6400000 100000")}, 64, 16),
        ("0::/a/b\n", {"a": version_2("400000 100000"), "a/b": version_2("max 100000")}, 4, 4),
        ("0::/a/b\n", {"a": version_2("max 100000"), "a/b": version_2("400000 100000")}, 4, 4),
        (
            "0::/a/b\n",
            {"a": version_2("300000 100000"), "a/b": version_2("400000 100000")},
            3,
            3,
        ),
        ("0::/of/the/host\n", {"": version_2("400000 100000")}, 4, 4),
        ("0::/a\n", {"a": version_2("nonsense")}, None, 16),
        ("5:cpu,cpuacct:/a\n1:name=x:/\n", {"cpu/a": version_1(250_000)}, 2.5, 2),
        ("5:cpu:/a\n0::/\n", {"cpu": version_1(300_000), "cpu/a": version_1(-1)}, 3, 3),
        ("5:cpu:/a\n", {"cpu/a": version_1(100_000, 50_000)}, 2, 2),
        ("5:cpuset:/a\n6:cpu:/\n", {"cpu": version_1(-1), "a": version_1(100_000)}, None, 16),
    ],
)
def test_smallest_cpu_quota_of_the_control_groups_counts(
    groups, monkeypatch, own, files, quota, cpus
):
    monkeypatch.setattr(environment, "count_own_cpus", lambda: 16)
    groups(own, files)
    assert environment.read_cpu_quota() == quota
    assert environment.count_cpus() == cpus


def test_system_without_control_groups_has_no_cpu_quota(groups):
    assert environment.read_cpu_quota() is None
    assert environment.count_cpus() == environment.count_own_cpus() >= 1
