"""What ``cllm doctor`` says about builds that this machine does not have."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from cllm.cli import hardware
from cllm.cli import probe as module
from cllm.cli.doctor import BUILD, SWITCHES, cure, doctor, failure, shorten_switches, suggest_build
from cllm.cli.model_sizes import describe_fits, list_fits
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
    assert f'CXXFLAGS="{SWITCHES}"' in (root / "docs" / "install.md").read_text()
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


def pci_device(folder, name: str, driver: str = "", **content: str) -> None:
    device = folder / name
    device.mkdir()
    for file, text in {
        "vendor": "0x10de",
        "class": "0x030200",
        "device": "0x2330",
        **content,
    }.items():
        (device / file).write_text(text + "\n")
    if driver:
        target = folder.parent / "drivers" / driver
        target.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(target)


@pytest.fixture
def pci(tmp_path, monkeypatch):
    """Return the folder of the PCI devices of a machine without NVIDIA's tool."""
    folder = tmp_path / "pci"
    folder.mkdir()
    monkeypatch.setattr(hardware, "PCI", folder)
    monkeypatch.setattr(hardware.platform, "system", lambda: "Linux")
    monkeypatch.setattr(hardware.shutil, "which", lambda _: None)
    return folder


def test_gpus_are_found_on_the_pci_bus(pci):
    """Not network cards, nor the display of a virtual machine."""
    pci_device(pci, "0000:01:00.0", "nvidia")
    pci_device(pci, "0000:02:00.0", vendor="0x1002")
    pci_device(pci, "0000:03:00.0", **{"class": "0x020000"})
    pci_device(pci, "0000:04:00.0", vendor="0x1234")
    (pci / "0000:05:00.0").mkdir()
    found = hardware.find_machine_gpus()
    assert [(gpu.vendor, gpu.driver) for gpu in found] == [("NVIDIA", "nvidia"), ("AMD", "")]
    assert str(found[1]) == "AMD GPU (PCI 0000:02:00.0, 0x2330), no driver"


def test_nvidia_tool_names_the_card_and_the_driver(pci, monkeypatch):
    pci_device(pci, "0000:01:00.0", "nvidia")
    monkeypatch.setattr(hardware.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    answer = subprocess.CompletedProcess([], 0, "NVIDIA H100, PCIe, 81559 MiB, 570.1\n")
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: answer)
    (gpu,) = hardware.find_machine_gpus()
    assert str(gpu) == "NVIDIA H100, PCIe (81559 MiB), driver 570.1"


def test_failing_nvidia_tool_leaves_the_pci_bus(pci, monkeypatch):
    pci_device(pci, "0000:01:00.0", "nvidia")
    monkeypatch.setattr(hardware.shutil, "which", lambda _: "/bin/false")
    monkeypatch.setattr(hardware, "NVIDIA_SMI", ("false",))
    assert [gpu.driver for gpu in hardware.find_machine_gpus()] == ["nvidia"]


@pytest.mark.parametrize(
    ("gpus", "used", "says"),
    [
        ([], (), ""),
        ([("NVIDIA", "a card", "driver 570")], ("CUDA0 (a card)",), ""),
        ([("NVIDIA", "a card", "driver 570")], (), "-DGGML_CUDA=ON"),
        ([("AMD", "a card", "amdgpu")], (), "-DGGML_HIP=ON"),
        ([("Intel", "a card", "i915")], (), "-DGGML_VULKAN=ON"),
        ([("Intel", "small", "i915"), ("NVIDIA", "large", "nvidia")], (), "does not use large"),
        ([("NVIDIA", "a card", "")], (), "install the driver of NVIDIA"),
        ([("Apple", "Apple GPU", "Metal")], (), "has no Metal"),
    ],
)
def test_unused_gpu_is_a_finding_with_a_fix(gpus, used, says):
    advice = hardware.suggest_gpu_build([hardware.MachineGpu(*gpu) for gpu in gpus], used)
    assert says in advice
    assert bool(advice) == bool(says)


def test_variant_for_wide_vectors_needs_no_narrow_ones():
    """AVX_VNNI is AVX512_VNNI for half as wide registers: no other build is faster."""
    system = "AVX2 = 1 | AVX512 = 1 | AVX512_VNNI = 1 |"
    found = Probe(answer="72", system=system, compiler="GCC", switches=SWITCHES)
    assert suggest_build(found, {"avx2", "avx512f", "avx512_vnni", "avx_vnni"}) == "none known"
    older = Probe(answer="72", system="AVX2 = 1 |", compiler="GCC", switches=SWITCHES)
    assert "AVX_VNNI" in suggest_build(older, {"avx2", "avx_vnni"})


def test_more_memory_fits_larger_models_and_longer_contexts():
    few = list_fits(4_000_000_000, on_gpu=False)
    many = list_fits(16_000_000_000, on_gpu=False)
    tokens = {(fit.model, fit.quantization): fit.max_tokens for fit in few}
    assert tokens["Qwen3 0.6B", "Q4_K_M"] > 0
    assert tokens["Qwen3 8B", "Q4_K_M"] == 0
    assert all(b.max_tokens >= a.max_tokens for a, b in zip(few, many, strict=True))
    assert {(f.model, f.quantization): f for f in many}["Qwen3 8B", "Q4_K_M"].max_tokens > 0


def test_copy_of_weights_counts_in_ram_but_not_on_gpus():
    """As for models that share a server's memory, see memory.weigh."""
    name = ("Qwen3 14B", "Q4_K_M")  # a file of 9.1 GB
    in_ram, on_gpu = (
        {(fit.model, fit.quantization): fit.max_tokens for fit in list_fits(13 * 10**9, on_gpu=gpu)}
        for gpu in (False, True)
    )
    assert in_ram[name] == 0
    assert on_gpu[name] > 10_000


def test_contexts_are_not_longer_than_trained():
    assert max(fit.max_tokens for fit in list_fits(10**15, on_gpu=False)) == 131_072


def test_table_has_a_line_for_each_model():
    lines = describe_fits(list_fits(8_000_000_000, on_gpu=False))
    assert len(lines) == 7
    assert "Q4_K_M" in lines[0]
    assert "too large" in lines[-1]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_doctor_names_kernels_gpus_and_sizes(monkeypatch, capsys, pci, flags):
    pci_device(pci, "0000:01:00.0", "nvidia")
    monkeypatch.setattr(
        "cllm.cli.doctor.probe", lambda: Probe(answer="72", variant="haswell", system="AVX2 = 1")
    )
    doctor(as_json="--json" in flags)
    printed = capsys.readouterr().out
    for text in ("haswell", "-DGGML_CUDA=ON", "Qwen3 8B", "NVIDIA GPU"):
        assert text in printed
    if flags:
        report = json.loads(printed)
        assert report["passed"]
        assert report["what fits"][0]["model"] == "Qwen3 0.6B"


def test_compiler_switches_fit_on_a_line():
    """The ones that determine the speed are shown; --json has all."""
    switches = "GNU C++17 12.2.0 -march=znver3 -mmmx -mpopcnt -msse -O3 -fschedule-insns -w"
    assert shorten_switches(switches) == "-march=znver3 -O3 -fschedule-insns and 4 more (--json)"
    assert shorten_switches("-O2 -w") == "-O2 -w"
    assert shorten_switches("not recorded") == "not recorded"
