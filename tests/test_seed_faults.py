"""The seeded faults fit the sources; running them takes too long for every change."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[1] / "tools" / "seed_faults.py"


def test_every_seeded_fault_can_be_applied() -> None:
    spec = importlib.util.spec_from_file_location("seed_faults", TOOL)
    tool = importlib.util.module_from_spec(spec)
    sys.modules["seed_faults"] = tool
    spec.loader.exec_module(tool)
    assert tool.find_stale(tool.FAULTS) == []
    assert len(tool.FAULTS) >= 50
    gone = tool.FAULTS[0]._replace(old="a text that does not occur")
    assert tool.find_stale([gone]) == [gone]


def test_page_about_tests_names_existing_ones() -> None:
    page = (TOOL.parents[1] / "docs" / "testing.md").read_text("utf-8")
    names = re.findall(r"`((?:\w+/)?test_\w+\.py)(?:::(\w+))?`", page)
    assert len(names) > 10
    for file, function in names:
        text = (TOOL.parents[1] / "tests" / file).read_text("utf-8")
        assert f"def {function}(" in text if function else text, (file, function)
