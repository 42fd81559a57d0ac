"""What ``cllm doctor`` says about builds that this machine does not have."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from cllm.cli import probe as module
from cllm.cli.doctor import BUILD, SWITCHES, cure, failure, suggest_build
from cllm.cli.probe import Probe, probe


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (
            Probe(died_of="SIGSEGV", error="the process was killed by SIGSEGV while decoding"),
            "-fno-tree-dse",
        ),
        (Probe(answer="7!x"), "-fno-tree-dse"),
        (Probe(error="ModuleNotFoundError: No module named 'llama_cpp'"), "not installed"),
        (Probe(error="something else"), "debug"),
        (Probe(answer="72"), ""),
    ],
)
def test_each_failure_suggests_a_fix(result, word):
    """For a crash and for a wrong answer, the fix is the compiler switches."""
    assert word in cure(result)
    assert result.passed == (word == "")


@pytest.mark.parametrize(
    ("compiler", "switches", "cpu", "says"),
    [
        ("GCC: (Debian) 12.2.0", f"GNU C++17 12.2.0 -O3 {SWITCHES}", {"avx2"}, "clang 19"),
        ("GCC: (Debian) 12.2.0", "GNU C++17 12.2.0 -O3 -fschedule-insns", {"avx2"}, BUILD),
        ("GCC: (Debian) 12.2.0", "", {"avx2"}, BUILD),
        ("clang version 19.1.7", "", {"avx2"}, "none known"),
        ("GCC: (Debian) 12.2.0", "", set(), "none known"),
        (
            "GCC: (Debian) 12.2.0",
            f"GNU C++17 12.2.0 -O3 {SWITCHES}",
            {"avx2", "avx512f"},
            "does not use AVX512",
        ),
    ],
)
def test_suboptimal_build_suggests_build_command(compiler, switches, cpu, says):
    """The build lacks the compiler switches or does not use the CPU's vector extensions."""
    found = Probe(
        answer="72",
        system="CPU : AVX = 1 | AVX2 = 1 | FMA = 1 |",
        compiler=compiler,
        switches=switches,
    )
    assert says in suggest_build(found, cpu)


def test_clang_is_not_recommended_for_avx512():
    """With the switches, GCC's AVX-512 kernels are as fast as clang's."""
    found = Probe(answer="72", system="AVX2 = 1 | AVX512 = 1 |", compiler="GCC", switches=SWITCHES)
    assert suggest_build(found, {"avx2", "avx512f"}) == "none known"


def test_compiler_switches_agree_in_all_files():
    """A build by hand must equal the build that was measured."""
    root = Path(__file__).resolve().parents[2]
    pyproject = tomllib.loads((root / "pyproject.toml").read_text())
    variables = pyproject["tool"]["uv"]["extra-build-variables"]["llama-cpp-python"]
    assert variables["CXXFLAGS"] == SWITCHES
    assert f'CXXFLAGS="{SWITCHES}"' in (root / "README.md").read_text()
    dropped = (root / "tools" / "setup.sh").read_text()
    assert all(switch in dropped for switch in SWITCHES.split() if switch.startswith("-f")), (
        "clang refuses them"
    )


@pytest.mark.llama
def test_library_reports_its_compiler():
    """It reports the compiler's signature, and the switches if GCC was told to record them."""
    from cllm.backends.llama_cpp.library import compiled

    compiler, switches = compiled()
    assert compiler.startswith(("GCC: ", "clang version "))
    assert not switches or "-O" in switches


def test_crashed_child_is_reported(monkeypatch):
    """The signal is named, and this process continues."""
    crash = ["python3", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"]
    run = subprocess.run
    monkeypatch.setattr(module.subprocess, "run", lambda _, **options: run(crash, **options))
    found = probe()
    assert found.died_of == "SIGSEGV"
    assert "SIGSEGV" in failure(found)
