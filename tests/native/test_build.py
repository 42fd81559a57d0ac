"""native/ reaches every build of llama.cpp."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_checksum_in_pyproject_makes_changes_of_the_kernels_compile_again() -> None:
    sources = [file for file in sorted((ROOT / "native").iterdir()) if file.suffix != ".md"]
    checksum = hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()[:8]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    variables = project["tool"]["uv"]["extra-build-variables"]["llama-cpp-python"]
    assert variables["CMAKE_ARGS"].split()[-1] == f"-DCLLM_KERNELS={checksum}"
