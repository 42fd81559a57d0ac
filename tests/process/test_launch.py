"""The environment of an engine process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cllm.process.launch import launch

NEEDED = {
    "OMP_NUM_THREADS": "2",
    "GGML_NO_BACKTRACE": "1",
    "CUDA_VISIBLE_DEVICES": "0",
    "LLAMA_SET_ROWS": "1",
    "PYTHONUNBUFFERED": "1",
    "TMPDIR": "/tmp",
    "HOME": "/nowhere",
    "LC_MESSAGES": "C",
    "TZ": "UTC",
}
SECRETS = [
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "AWS_SECRET_ACCESS_KEY",
    "CLLM_SERVER_API_KEY",
    "DATABASE_URL",
    "LLAMA_API_KEY",
    "LLAMA_ARG_HF_TOKEN",
    "NVIDIA_API_KEY",
]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")
def test_engine_process_gets_no_secrets(monkeypatch):
    """A real process inherits the variables that it needs, plus GLIBC_TUNABLES. It inherits no
    tokens and nothing else.
    """
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret value")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere/lib")
    process = launch()
    try:
        # empty for a moment, until the system has set up the new program
        while not (content := Path(f"/proc/{process.pid}/environ").read_bytes()):
            time.sleep(0.01)
    finally:
        process.kill()
        process.communicate()
    entries = content.decode().rstrip("\0").split("\0")
    environment = dict(entry.split("=", 1) for entry in entries)
    assert NEEDED.items() <= environment.items()
    assert environment["LD_LIBRARY_PATH"] == "/nowhere/lib"
    assert {"PATH", "GLIBC_TUNABLES"} <= environment.keys()
    assert not environment.keys() & {*SECRETS}
    assert "a secret value" not in environment.values()
