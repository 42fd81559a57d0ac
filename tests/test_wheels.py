"""tools/build_wheels.py, as far as it needs no compiler, and cLLM's own wheel."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tools import build_wheels

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = next(d for d in PROJECT["project"]["dependencies"] if d.startswith("llama-cpp-python"))
SDIST = """[project]
name = "llama_cpp_python"
dynamic = ["version"]
description = "Python bindings"

[tool.scikit-build]
wheel.py-api = "py3"

[tool.scikit-build.metadata.version]
provider = "scikit_build_core.metadata.regex"
input = "llama_cpp/__init__.py"

[project.urls]
Homepage = "https://example.org"
"""


def test_source_package_is_the_pinned_one() -> None:
    name, version, digest = build_wheels.read_pin()
    assert f"{name}=={version}" == PIN
    assert len(bytes.fromhex(digest)) == 32


@pytest.mark.parametrize("gpu", [None, *build_wheels.GPUS])
def test_version_satisfies_the_pin_and_is_preferred_to_the_source_package(gpu) -> None:
    _, version, _ = build_wheels.read_pin()
    companion = build_wheels.companion_version(version, gpu)
    assert companion in SpecifierSet(PIN.removeprefix("llama-cpp-python"))
    assert Version(companion) > Version(version)


def test_version_of_the_source_package_is_replaced(tmp_path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(SDIST)
    build_wheels.set_version(file, "0.3.36+cllm.1")
    table = tomllib.loads(file.read_text())
    assert table["project"]["version"] == "0.3.36+cllm.1"
    assert "dynamic" not in table["project"]
    assert "metadata" not in table["tool"]["scikit-build"]
    assert table["project"]["urls"]


def test_patch_needs_its_place_exactly_once(tmp_path) -> None:
    file = tmp_path / "CMakeLists.txt"
    file.write_text("one\ntwo\n")
    build_wheels.patch(file, "two\n", "more\n")
    assert file.read_text() == "one\nmore\ntwo\n"
    with pytest.raises(AssertionError, match="has changed"):
        build_wheels.patch(file, "three\n", "more\n")


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes a stand-in for the C++ compiler."""

    def use(says: str) -> None:
        program = tmp_path / "c++"
        program.write_text(f"#!/bin/sh\necho '{says}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("CXX", str(program))

    return use


def test_switches_are_those_of_pyproject_and_the_ones_for_all_cpus(compiler, tmp_path) -> None:
    compiler("g++ (Debian 12.2.0) 12.2.0")
    table = PROJECT["tool"]["uv"]["extra-build-variables"]["llama-cpp-python"]
    found = build_wheels.compiler_variables("vulkan", "-DX=ON -DY=1", tmp_path / "in clude")
    assert found["CXXFLAGS"] == table["CXXFLAGS"]
    assert found["CFLAGS"] == table["CFLAGS"]
    for switch in (
        table["CMAKE_ARGS"],
        "-DGGML_NATIVE=OFF -DGGML_BACKEND_DL=ON -DGGML_CPU_ALL_VARIANTS=ON",
        "-DGGML_VULKAN=ON -DX=ON -DY=1",
        f"'-DCMAKE_PROJECT_llama.cpp_INCLUDE={tmp_path}/in clude'",
    ):
        assert switch in found["CMAKE_ARGS"]


def test_clang_does_not_get_the_switches_for_gcc(compiler, tmp_path) -> None:
    compiler("Debian clang version 19.1.7")
    assert build_wheels.compiler_variables(None, "", tmp_path)["CXXFLAGS"] == "-w"


def test_missing_compiler_is_one_line(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match="a C\\+\\+ compiler is needed"):
        build_wheels.compiler_is_gcc()


def test_archive_with_another_hash_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(build_wheels, "WORK", tmp_path)
    (tmp_path / "llama_cpp_python-1.tar.gz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="does not have the hash"):
        build_wheels.download(Path("python"), {}, "llama-cpp-python", "1", "00" * 32)


@pytest.mark.slow
def test_wheel_of_cllm_has_its_data_files(tmp_path) -> None:
    """Those that are read at run time: the built-in model, templates, pages."""
    uv = shutil.which("uv") or ROOT / ".tools" / "bin" / "uv"
    if not Path(uv).exists():
        pytest.skip("uv is not installed")
    command = [str(uv), "build", "--wheel", "--quiet", "--out-dir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    version = PROJECT["project"]["version"]
    assert wheel.name == f"cllm-{version}-py3-none-any.whl"
    source = ROOT / "src"
    expected = {
        str(file.relative_to(source))
        for file in (source / "cllm").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert "cllm/models/builtin/builtin.gguf" in expected
    assert expected <= set(zipfile.ZipFile(wheel).namelist())
