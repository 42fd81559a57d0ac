"""The seeded faults fit the sources; running them takes too long for every change."""

from __future__ import annotations

import importlib.util
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
