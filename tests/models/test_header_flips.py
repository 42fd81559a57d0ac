"""Files with flipped bits in their header: the result is an error or a working model, and only an
engine process may crash.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import repeat

pytestmark = [pytest.mark.llama, pytest.mark.slow]

TESTS = Path(__file__).parents[1]
FLIPS = repeat(250, 25)  # of each model and seed


def try_flips(model: Path, seed: int) -> dict:
    command = [sys.executable, str(TESTS / "header_flips.py"), str(model)]
    options = ["--flips", str(FLIPS), "--seed", str(seed)]
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, env=environ, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("seed", range(repeat(4, 1)))
@pytest.mark.parametrize("kind", ["builtin", "lfm2"])
def test_flipped_header_bits_crash_only_the_engine(builtin_path, tiny_model, kind, seed):
    """header_flips.py defines what may crash. For more flips: python tests/header_flips.py MODEL
    --flips 100000.
    """
    found = try_flips(builtin_path if kind == "builtin" else tiny_model(kind), seed)
    assert found["broken"] == []
    assert sum(found["ends"].values()) == FLIPS
    assert found["ends"]["engine 0"] > 0
