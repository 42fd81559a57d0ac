"""Build llama.cpp's own programs from the very source that cLLM runs on.

A comparison with llama-server or llama-batched-bench says something about the server only if both
stand on the same llama.cpp, compiled with the same switches. So the source is the tree inside the
llama-cpp-python sdist that uv.lock names, and the switches are those of pyproject.toml.

    python3 benchmarks/build_peers.py [FOLDER]        (default: .tools/peers; standard library only)

SKBUILD_CMAKE_ARGS of the environment is added, as it is when uv builds llama-cpp-python: -DGGML_CUDA=ON;-D...
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "llama-cpp-python"
PROGRAMS = ["llama-server", "llama-bench", "llama-batched-bench"]

# The web page would be downloaded during the build, TLS would need OpenSSL; a benchmark needs neither.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".tools" / "peers").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    source, build, log = folder / "llama.cpp", folder / "build", folder / "build.log"
    if not source.exists():
        put_source(source)

    variables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["extra-build-variables"][PACKAGE]
    # Without the ceiling, git would call the commit of cLLM the build of llama.cpp.
    environment = os.environ | variables | {"GIT_CEILING_DIRECTORIES": str(folder)}
    arguments = shlex.split(variables.get("CMAKE_ARGS", "")) + os.environ.get("SKBUILD_CMAKE_ARGS", "").split(";")
    arguments += [f"-D{name}={value}" for name, value in OPTIONS.items()]
    cmake = find_cmake(folder)

    print(f"building {', '.join(PROGRAMS)} in {build}")
    print(f"  switches {variables}\n  log      {log}", flush=True)
    with log.open("w") as output:
        for command in (
            [cmake, "-S", str(source), "-B", str(build), *filter(None, arguments)],
            [cmake, "--build", str(build), "--parallel", str(os.cpu_count()), "--target", *PROGRAMS],
        ):
            if run(command, environment, output):
                sys.exit(f"failed; the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-20:]))
    for program in PROGRAMS:
        print(build / "bin" / program)


def run(command: list[str], environment: dict[str, str], log: TextIO) -> int:
    """The exit status; what the command says goes to the log, how far it is to stdout, every ten percent."""
    print(f"$ {shlex.join(command)}", file=log, flush=True)
    shown = 0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            print(line, end="", file=log, flush=True)
            percent = re.match(r"\[ *(\d+)%\]", line)
            if percent and int(percent[1]) >= shown + 10:
                shown = int(percent[1])
                print(f"  {shown} %", flush=True)
    return process.returncode


def put_source(target: Path) -> None:
    """Unpack vendor/llama.cpp: from uv's cache if it lies there, else from PyPI."""
    package = locked_package()
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache" / "uv")
    for found in cache.glob(f"sdists-v*/pypi/{PACKAGE}/{package['version']}/*/src/vendor/llama.cpp"):
        print(f"copying llama.cpp from {found}", flush=True)
        shutil.copytree(found, partial := target.with_suffix(".partial"), symlinks=True, dirs_exist_ok=True)
        partial.rename(target)
        return
    url, expected = package["sdist"]["url"], package["sdist"]["hash"]
    archive = target.parent / url.rsplit("/", 1)[-1]
    print(f"fetching {url}", flush=True)
    urllib.request.urlretrieve(url, archive)
    if "sha256:" + hashlib.sha256(archive.read_bytes()).hexdigest() != expected:
        sys.exit(f"{archive} is not the file that uv.lock names")
    with tarfile.open(archive) as tar:
        tar.extractall(target.parent, filter="data")
    archive.with_suffix("").with_suffix("").joinpath("vendor", "llama.cpp").rename(target)


def locked_package() -> dict[str, Any]:
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    return next(package for package in packages if package["name"] == PACKAGE)


def find_cmake(folder: Path) -> str:
    if system := shutil.which("cmake"):
        return system
    private = folder / "cmake"
    if not private.exists():
        subprocess.run([sys.executable, "-m", "venv", private], check=True)
        subprocess.run([private / "bin" / "pip", "install", "--quiet", "cmake"], check=True)
    return str(private / "bin" / "cmake")


if __name__ == "__main__":
    main()
