"""Paths that cannot be read or written: one line and exit code 2, whatever the command."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TOO_LONG = "x" * 300 + ".gguf"  # a name for which every call of the system fails
COMMANDS = [
    ("serve", "{}"),
    ("serve", "--config", "{}"),
    ("serve", "--models.folder", "{}"),
    ("generate", "Hi", "--model.chat-template-file", "{}"),
    ("chat", "{}"),
    ("generate", "Hi", "--model", "{}"),
    ("run", "{}", "Hi"),
    ("run", "cllm-builtin", "Hi", "--format", "{}"),
    ("show", "{}"),
    ("tune", "{}"),
    ("simulate", "{}"),
    ("serve", "{}", "--model.sha256", "0" * 64),
    ("keys", "list", "--file", "{}"),
    ("keys", "add", "bob", "--file", "{}"),
    ("list", "--config", "{}"),
    ("create", "new", "--file", "{}"),
]


def check_one_line(result) -> str:
    assert (result.code, result.out) == (2, ""), result.err
    *_, line = result.err.splitlines()
    assert line.startswith("cllm: ")
    assert "Traceback" not in result.err
    return line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_unusable_path_gives_one_line(cllm, tmp_path: Path, command: tuple[str, ...]) -> None:
    """The line names the path."""
    path = tmp_path / TOO_LONG
    line = check_one_line(cllm(*(word.format(path) for word in command)))
    assert TOO_LONG in line or "File name too long" in line


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_locked_folder_gives_one_line(
    cllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    path = tmp_path / "locked" / "m.gguf"
    for name in ("stat", "lstat", "open", "mkdir", "scandir", "listdir"):
        lock(monkeypatch, name, str(path))
    line = check_one_line(cllm(*(word.format(path) for word in command)))
    assert "denied" in line


def lock(monkeypatch: pytest.MonkeyPatch, name: str, path: str) -> None:
    """Let a call of the system fail for a path and everything in it, as for other users."""
    call = getattr(os, name)

    def deny(target, *arguments, **options):
        if str(target).startswith(path):
            raise PermissionError(13, "Permission denied", str(target))
        return call(target, *arguments, **options)

    monkeypatch.setattr(os, name, deny)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_pipe_that_nothing_writes_to_gives_one_line(
    cllm, tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    check_one_line(cllm(*(word.format(path) for word in command)))


@pytest.mark.parametrize(
    "command",
    [
        ("run", "cllm-builtin", "Hi", "--format", "{}"),
        ("simulate", "{}"),
        ("keys", "list", "--file", "{}"),
        ("create", "new", "--file", "{}"),
    ],
    ids=" ".join,
)
def test_device_without_an_end_gives_one_line(cllm, command: tuple[str, ...]) -> None:
    check_one_line(cllm(*(word.format("/dev/zero") for word in command)))


def test_argument_that_is_not_utf8_gives_one_line(cllm) -> None:
    assert "a\\udcff' is not UTF-8 text" in check_one_line(cllm("stop", "a\udcff"))


def test_settings_are_read_from_a_pipe(cllm, tmp_path: Path) -> None:
    """As a shell's <(...) gives one."""
    read, write = os.pipe()
    os.write(write, b"server: {port: 1234}")
    os.close(write)
    assert "1234" in cllm("config", "show", "--config", f"/dev/fd/{read}").out
    os.close(read)
