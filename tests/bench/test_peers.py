"""Finding the programs with which cLLM is compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cllm.bench import peers
from cllm.bench.peers import EXAMPLE_SERVER, build, find, find_example_server, find_required
from cllm.errors import StartupError


def program(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.skipif(sys.platform == "win32", reason="programs are called otherwise")
def test_given_folder_precedes_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    folder = tmp_path / "folder"
    assert find("llama-server", folder) is None
    with pytest.raises(
        StartupError, match=r"llama-server is neither in .*folder nor on PATH; .*--build builds it"
    ):
        find_required("llama-server", folder)
    on_path = program(tmp_path / "path", "llama-server")
    assert find("llama-server", folder) == on_path
    there = program(folder, "llama-server")
    assert find_required("llama-server", folder) == there
    there.chmod(0o644)
    assert find("llama-server", folder) == on_path


def test_relative_folder_is_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program(tmp_path / "bin", "llama-bench")
    assert find("llama-bench", Path("bin")) == tmp_path / "bin" / "llama-bench"


def test_example_server_reports_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match="is not there"):
        find_example_server(tmp_path)
    (tmp_path / EXAMPLE_SERVER).touch()
    monkeypatch.setattr(peers, "EXAMPLE_SERVER_NEEDS", ("msgspec", "no_such_package"))
    with pytest.raises(StartupError, match=r"pip install no_such_package$"):
        find_example_server(tmp_path)
    monkeypatch.setattr(peers, "EXAMPLE_SERVER_NEEDS", ("msgspec",))
    assert find_example_server(tmp_path) == tmp_path / EXAMPLE_SERVER


def test_build_requires_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    with pytest.raises(StartupError, match="checkout"):
        build(tmp_path / "peers", print)
    assert not (tmp_path / "peers").exists()


def test_sources_are_reused_from_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If uv has the sdist of the version in uv.lock, nothing is downloaded."""
    version = peers.locked_package()["version"]
    sdist = tmp_path / "sdists-v1" / "pypi" / peers.PACKAGE / version / "x" / "src"
    (sdist / "vendor" / "llama.cpp").mkdir(parents=True)
    (sdist / "vendor" / "llama.cpp" / "CMakeLists.txt").write_text("cmake")
    (sdist / "examples" / "server").mkdir(parents=True)
    (sdist / "examples" / "server" / "server.py").write_text("server")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path))
    source, example = (
        tmp_path / "peers" / "llama.cpp",
        tmp_path / "peers" / "build" / "bin" / EXAMPLE_SERVER,
    )
    peers.put_sources(tmp_path / "peers", source, example, lambda _: None)
    assert (source / "CMakeLists.txt").read_text() == "cmake"
    assert example.read_text() == "server"
