"""Flame graphs of an engine."""

from __future__ import annotations

import time
from collections import Counter
from xml.etree import ElementTree

import msgspec
import pytest

from cllm.bench.flame import draw, encode_speedscope, sample, sample_engine
from cllm.bench.work import WorkSize
from cllm.cli.main import main

STACKS = Counter({("step", "forward"): 3, ("step", "sample<T>"): 1})


def slow() -> None:
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass


def test_sampled_stacks_begin_with_the_work():
    stacks = sample(slow)
    assert stacks.total() > 5
    assert {stack[0].split()[0] for stack in stacks} == {"slow"}


def test_speedscope_file_has_every_stack():
    content = msgspec.json.decode(encode_speedscope(STACKS))
    names = [frame["name"] for frame in content["shared"]["frames"]]
    [profile] = content["profiles"]
    found = [[names[i] for i in stack] for stack in profile["samples"]]
    assert found == [["step", "forward"], ["step", "sample<T>"]]
    assert (profile["weights"], profile["endValue"]) == ([3, 1], 4)


def test_picture_has_a_box_for_each_function():
    root = ElementTree.fromstring(draw(STACKS))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == ["step: 100.0%", "forward: 75.0%", "sample<T>: 25.0%"]
    widths = [float(box.get("width")) for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert widths == [1200, 900, 300]


def test_flame_needs_a_file_that_can_be_written(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "stages", "--flame", str(tmp_path / "none" / "flame.svg")])
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.llama
def test_engine_spends_its_time_in_steps(builtin_path):
    stacks = sample_engine(builtin_path, WorkSize(2, 8, 8, 0.0, 0), seconds=0.5)
    assert {stack[0].split()[0] for stack in stacks} == {"step_engine"}
    assert any("Engine.step" in one for stack in stacks for one in stack)
