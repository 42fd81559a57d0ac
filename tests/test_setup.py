"""tools/setup.sh, with stand-ins for uv, pip and the compilers that only record their arguments."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "setup.sh"

UV = """#!/bin/sh
echo "uv $*" >>"$CALLS"
case "$1 $2" in
  "--version ") echo "uv 0.13.0" ;;
  "sync --check") [ -e ready ] ;;
  "python find") ;;
  *--offline*) [ -e cached ] && touch ready ;;
  sync*)
    [ "$UV_SYSTEM_CERTS" = true ] || { echo "error: invalid peer certificate: $FAULT" >&2; exit 2; }
    touch ready ;;
  *) exit 9 ;;
esac
"""
PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p .tools/uv/bin && cp "$FAKES/pip" .tools/uv/bin/pip
"""
PIP = """#!/bin/sh
echo "pip $*" >>"$CALLS"
case "$*" in
  *"--cert /"*" uv") cp "$FAKES/real-uv" .tools/uv/bin/uv ;;
  *--quiet*) echo "ERROR: No matching distribution found for uv" >&2; exit 1 ;; # that is all it says then
  *) echo "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] $FAULT'))" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def run(tmp_path: Path):
    """Return a function that runs the script in a checkout of its own.

    It returns the result, and the calls of uv and pip.
    """
    fakes, checkout = tmp_path / "fakes", tmp_path / "checkout"
    (checkout / "tools").mkdir(parents=True)
    shutil.copy(SCRIPT, checkout / "tools")
    fakes.mkdir()

    def run(programs: dict[str, str], *command: str, fault: str = "UnknownIssuer", links: str = ""):
        for name, content in programs.items():
            (fakes / name).write_text(content)
            (fakes / name).chmod(0o755)
        calls = tmp_path / "calls"
        calls.touch()
        environ = {
            "PATH": f"{fakes}:/usr/bin:/bin",
            "CALLS": str(calls),
            "FAKES": str(fakes),
            "FAULT": fault,
            "PIP_FIND_LINKS": links,
        }
        script = ["sh", str(checkout / "tools" / "setup.sh"), *command]
        done = subprocess.run(script, env=environ, capture_output=True, text=True, check=False)
        return done, calls.read_text().splitlines()

    return run


COMPILER = {"cc": "#!/bin/sh\n", "c++": "#!/bin/sh\necho g++\n"}


def test_unknown_certificate_makes_uv_use_the_system_store(run):
    """A message says so, and the command runs again with that environment."""
    done, calls = run({"uv": UV, **COMPILER}, "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert (
        "uv does not know the certificate of the package index: trying again with the system's"
        in done.stderr
    )
    assert calls.count("uv sync --inexact") == 2


def test_nothing_is_compiled_or_fetched_if_the_cache_has_all(run, tmp_path: Path):
    """A second clone of the same user takes the llama.cpp that the first one has compiled."""
    (tmp_path / "checkout" / "cached").touch()
    done, calls = run({"uv": UV}, "echo", "hello")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    assert "uv sync --offline --quiet --inexact" in calls
    assert "uv sync --inexact" not in calls


def test_sources_in_the_cache_are_compiled_without_asking_the_index(run):
    """Its answer may make uv fetch them again, and forget what it compiled from the old ones."""
    uv = UV.replace(
        "*--offline*) [ -e cached ]",
        """*--offline*)
    [ "$CXX" != false ] || { echo "  cause: The build backend returned an error" >&2; exit 1; }""",
    )
    done, calls = run({"uv": uv, **COMPILER}, "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert "compiling llama.cpp" in done.stderr
    assert [call for call in calls if call.startswith("uv sync") and "--check" not in call] == [
        "uv sync --offline --quiet --inexact",
        "uv sync --offline --inexact",
    ]


@pytest.mark.parametrize(
    ("wheel", "source"),
    [
        ("torch-2.13.0+cpu-cp311.whl", "--find-links {}"),
        ("torch-2.13.0-cp311.whl", "--torch-backend cpu"),
    ],
)
def test_torch_for_cpus_is_installed_on_request_only(run, tmp_path, wheel, source):
    """From the folder that pip has been told of, or else from PyTorch's own index, but never from
    uv.lock, which has the one for CUDA.
    """
    (tmp_path / "checkout" / "ready").touch()
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / wheel).touch()
    uv = UV.replace(
        "*) exit 9",
        """"pip install")
    for name in torch transformers; do mkdir -p .venv/lib/python3.11/site-packages/$name; done ;;
  *) exit 9""",
    )
    programs = {"uv": uv}
    done, calls = run(programs, "echo", "hello", links=str(tmp_path / "wheels"))
    assert not any("torch" in call for call in calls)
    done, calls = run(programs, "--torch", "echo", "hello", links=str(tmp_path / "wheels"))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert "fetching PyTorch 2.13.0 for CPUs" in done.stderr
    options = f"--quiet --python .venv {source.format(tmp_path / 'wheels')}"
    assert calls[-1] == f"uv pip install {options} torch==2.13.0 transformers==5.24.0"
    again, calls_again = run(programs, "--torch", "echo", "hello")
    assert again.stderr == ""
    assert calls_again[len(calls) :] == [
        "uv --version",
        "uv sync --check --inexact --offline --quiet",
    ]


def test_compilation_that_fails_is_not_retried(run):
    uv = UV.replace(
        "*--offline*) [ -e cached ]",
        '*--offline*) echo "  cause: The build backend returned an error, $CXX" >&2; exit 1',
    )
    done, calls = run({"uv": uv, **COMPILER}, "echo", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert "returned an error, " in done.stderr
    assert "returned an error, false" not in done.stderr
    assert "uv sync --inexact" not in calls


def test_other_failures_are_not_retried(run):
    uv = UV.replace("invalid peer certificate: $FAULT", "no space left on device")
    done, calls = run({"uv": uv, **COMPILER}, "echo", "hello")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no space left" in done.stderr
    assert "certificate" not in done.stderr
    assert calls.count("uv sync --inexact") == 1


@pytest.mark.skipif(
    not Path("/etc/ssl/certs/ca-certificates.crt").exists(), reason="not where this system has them"
)
def test_unknown_certificate_makes_pip_use_the_system_store(run):
    """When pip has to install uv first."""
    done, calls = run({"python3": PYTHON, "pip": PIP, "real-uv": UV, **COMPILER}, "echo", "hello")
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert "pip does not know the certificate" in done.stderr
    install = "pip install --disable-pip-version-check"
    assert calls[:2] == [f"{install} uv", f"{install} --cert /etc/ssl/certs/ca-certificates.crt uv"]


def test_clang_does_not_get_switches_of_gcc(run, tmp_path: Path):
    """The GCC switches in pyproject.toml other than -w are dropped. All others reach clang."""
    compiler = tmp_path / "fakes" / "c++"
    done, _ = run(
        {
            "uv": UV.replace('"$UV_SYSTEM_CERTS"', "true"),
            "cc": "#!/bin/sh\n",
            "c++": '#!/bin/sh\necho "clang $*"\n',
        },
        *(
            "sh",
            "-c",
            '"$CXX" -O2 $(sed -n "s/.*CXXFLAGS = \\"\\([^\\"]*\\)\\".*/\\1/p" "$0") "a b"',
        ),
        str(SCRIPT.parents[1] / "pyproject.toml"),
    )
    assert compiler.exists()
    assert (done.returncode, done.stdout) == (0, "clang -O2 -w a b\n"), done.stderr
