"""CPU time inside functions."""

from __future__ import annotations

import threading
import time

import pytest

from cllm.observe.cpu_time import CpuMeter


def spin() -> int:
    end = time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    return 7


def test_meter_adds_up_all_threads() -> None:
    """CPU time outside the function does not count, nor does time asleep."""

    def compute() -> int:
        thread = threading.Thread(target=spin)
        thread.start()
        result = spin()
        thread.join()
        time.sleep(0.2)
        return result

    meter = CpuMeter()
    assert meter.timing(compute)() == 7
    spin()
    assert 0.1 <= meter.seconds < 0.2


def test_failing_call_counts() -> None:
    def fail(_: int) -> None:
        spin()
        raise ValueError

    meter = CpuMeter()
    with pytest.raises(ValueError, match=r"^$"):
        meter.timing(fail)(1)
    assert meter.seconds >= 0.05
