"""A real server to measure: ``cllm serve`` with the fake backend, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PATIENCE

COMMAND = [sys.executable, "-c", "from cllm.cli.main import main; main()"]


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a ready server."""
    folder = tmp_path_factory.mktemp("fake_server")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--backend.name", "fake", "--port", "0"],
            cwd=folder,
            env=environ,
            stderr=log,
        )
    try:
        url = wait_for_url(process, folder / "log")
        wait_until_ready(url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()


def wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        text = log.read_text()
        if found := re.search(r"cLLM serves .* at (http://\S+):", text):
            return found[1]
        assert process.poll() is None, text
        time.sleep(0.05)
    raise AssertionError(f"no server after {PATIENCE} s: {log.read_text()}")


def wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=PATIENCE) as response:
                if response.status == 200:
                    return
        except urllib.error.HTTPError as error:
            error.close()
        time.sleep(0.05)
    raise AssertionError(f"{url} is not ready after {PATIENCE} s")
