"""The messages of ``cllm serve`` before it serves."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cllm.backends.fake.backend import FakeBackend
from cllm.cli import progress
from cllm.cli.remarks import remarks
from cllm.config.sources import load_settings
from cllm.errors import StartupError
from cllm.server.access import Access, check_access
from cllm.server.addresses import check_host

FAKE = ("--backend.name", "fake")


def one_line(result) -> str:
    """Return the error of a start that fails, and check exit code 2 and the single line."""
    assert (result.code, result.out) == (2, ""), result.err
    (line,) = result.err.splitlines()
    assert line.startswith("cllm: ")
    return line


def test_busy_port_gives_one_line(cllm):
    """The line names the port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} " in one_line(cllm("serve", *FAKE, "--port", port))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no file"),
        (b"", "empty"),
        (b"<html>", "web page"),
        (b"version https://git-lfs", "LFS"),
        (b"GGUFxxxx", ""),
    ],
)
def test_unreadable_model_gives_one_line(cllm, tmp_path: Path, content: bytes | None, words: str):
    """The file is missing, empty, a web page, a Git LFS pointer, or random bytes."""
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    assert words in one_line(cllm("serve", path))


@pytest.mark.llama
def test_truncated_model_gives_one_line(cllm, builtin_path: Path, tmp_path: Path):
    """The line states the size that the file should have."""
    path = tmp_path / "model.gguf"
    path.write_bytes(builtin_path.read_bytes()[:-1000])
    assert "incomplete" in one_line(cllm("serve", path))


@pytest.mark.llama
@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_impossible_layout_gives_one_line(cllm, tiny_model, kind: str):
    """Paged memory is for attention only."""
    result = cllm("serve", tiny_model(kind), "--kv.layout", "paged", "--port", 0)
    assert (result.code, result.out) == (2, "")
    *loading, error = result.err.splitlines()
    assert all(line.startswith(f"cllm: loading {kind}") for line in loading)
    assert error.startswith("cllm: kv.layout is paged, which needs Linux, a model on the CPU, and ")


def test_unknown_option_gives_one_line(cllm, tmp_path: Path):
    """The error names the flag, or the file and its key."""
    assert "--port must be" in one_line(cllm("serve", "--port", "70000"))
    path = tmp_path / "c.yaml"
    path.write_text("server:\n  prot: 1\n")
    line = one_line(cllm("serve", "--config", path))
    assert "c.yaml" in line
    assert "prot" in line


@pytest.mark.parametrize(
    ("given", "in_force", "words"),
    [
        ({}, {"max_num_seqs": 3, "context_length": 64}, []),
        ({"scheduler.max_num_seqs": 8}, {"max_num_seqs": 8}, []),
        (
            {"scheduler.max_num_seqs": 8},
            {"max_num_seqs": 3},
            ["scheduler.max_num_seqs is 3 instead of 8", "kv.max_memory"],
        ),
        (
            {"model.max_context_length": 90},
            {"context_length": 80},
            ["is 80 instead of 90", "raise kv.max_memory_mb"],
        ),
        (
            {"model.max_context_length": 900},
            {"context_length": 900},
            ["is 900, but", "trained with 100 tokens"],
        ),
    ],
)
def test_reduced_sizes_are_reported(
    given: dict[str, int], in_force: dict[str, int], words: list[str]
):
    """One line names the option to raise; sizes that were not requested are not mentioned."""
    info = msgspec.structs.replace(FakeBackend().info, trained_context_length=100, **in_force)
    lines = list(remarks(load_settings(None, {}, given), info))
    assert len(lines) == bool(words)
    assert all(word in lines[0] for word in words)


def test_progress_without_terminal_prints_few_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """There is a line at the beginning and for each quarter, more for slow quarters, and none if
    all of it is fast.
    """
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    bar = progress.open_bar("loading m", announce=True)
    for share in range(0, 101, 5):
        bar.update(share / 100)
    assert capsys.readouterr().err == "loading m\n"
    bar = progress.open_bar("loading m")
    for share in range(0, 101, 5):
        now += 0.4
        bar.update(share / 100)
    assert capsys.readouterr().err.split() == [
        f"{word}" for s in (25, 50, 75, 100) for word in ("loading", "m:", f"{s}%")
    ]
    bar = progress.open_bar("loading m")
    for share in range(20):
        now += 1
        bar.update(share / 100)
    assert len(capsys.readouterr().err.splitlines()) == 4


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1:9000", "use --host 127.0.0.1 --port 9000"),
        ("localhost:9000", "use --host localhost --port 9000"),
        ("[::1]:9000", "use --host ::1 --port 9000"),
        ("http://127.0.0.1:9000/v1", "use --host 127.0.0.1 --port 9000"),
        ("https://example.test", "use --host example.test"),
        ("::1]", "must be an address or a name"),
        ("9000", "; use --port 9000"),
        (":9000", "; use --port 9000"),
        ("::1:9000", "; use --host ::1 --port 9000"),
        ("*:9000", "; use --host 0.0.0.0 --port 9000"),
        ("0.0.0.0/0", "must be an address or a name; use --host 0.0.0.0"),
        ("127.0.0.256", "not an address or a known name"),
        ("*", "0.0.0.0 is all addresses"),
    ],
)
def test_wrong_host_gives_a_line_about_the_address(cllm, host: str, words: str):
    line = one_line(cllm("serve", *FAKE, "--host", host))
    assert words in line
    assert "key" not in line


@pytest.mark.parametrize("host", ["ex ample", " ", "unix:/run/cllm.sock", "http:"])
def test_host_that_cannot_work_is_not_recommended(cllm, host: str):
    assert "use --host" not in one_line(cllm("serve", *FAKE, "--host", host))


@pytest.mark.parametrize("host", ["127.1", "127.0.0.01", "0x7f000001", "2130706433"])
def test_short_form_of_a_loopback_address_needs_no_key(host: str, tmp_path: Path):
    flags = {"server.host": host, "server.keys_file": str(tmp_path / "keys.json")}
    settings = load_settings(None, {}, flags).settings
    check_access(settings, Access(settings))
    elsewhere = load_settings(None, {}, flags | {"server.host": "10.1"}).settings
    with pytest.raises(StartupError, match="can be reached from other machines"):
        check_access(elsewhere, Access(elsewhere))


@pytest.mark.parametrize("host", ["[::1]", "::1", "127.0.0.1"])
def test_host_may_have_the_brackets_of_a_url(host: str):
    settings = load_settings(None, {}, {"server.host": host}).settings
    assert settings.server.host == host.strip("[]")
    check_host(settings.server.host)


@pytest.mark.slow
def test_api_process_starts_without_numpy() -> None:
    """Only engines and vectors need it; importing it takes a tenth of the start."""
    code = "import sys, cllm.cli.serve, cllm.server.app; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
