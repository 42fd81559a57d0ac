"""Compare compilers and switches for llama.cpp's CPU kernels: the speed, and whether the logits
stay the same.

    python benchmarks/build_flags.py --model models/qwen3-0.6b.gguf --rounds 7 --only default cllm
    clang-19

Only ggml-cpu is rebuilt for each candidate, from the source that ``cllm bench compare --build``
fetches. Everything else is the installed llama-cpp-python. The candidates are measured in turn,
each in its own process. A ratio is always between two measurements of the same round. A candidate
whose compiler is not installed is skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from cllm.cli.doctor import SWITCHES, describe_cpu, read_cpu_flags

SOURCE, BUILDS = Path(".tools/peers/llama.cpp"), Path(".tools/build-flags")
BASE = "default"
CURE = "-fno-tree-sra -fno-tree-dse -fno-dse"  # without it GCC 12's AMX code crashes
OPTIONS = [
    "BUILD_SHARED_LIBS=ON",
    "LLAMA_BUILD_COMMON=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
]
PREFILL_TOKENS, DECODE_STEPS, DECODING = 256, 24, (1, 8, 16)


class Candidate(NamedTuple):
    """How ggml-cpu is compiled.

    ``level`` replaces Release's -O3. ``needs``: a flag that the CPU must have. ``native``: for this
    CPU; if not, for any CPU with AVX2.
    """

    cc: str = "gcc-12"
    cxx: str = "g++-12"
    flags: str = ""
    c_flags: str = "-w"
    level: str = "-O3"
    trains: bool = False  # runs once, and is then compiled again with the profile of that run
    needs: str = ""
    native: bool = True


CANDIDATES = {
    BASE: Candidate(),
    "AMX cure": Candidate(flags=CURE),
    "cllm": Candidate(flags=SWITCHES),
    "cllm, C too": Candidate(flags=SWITCHES, c_flags="-fschedule-insns -fsched-pressure -w"),
    "schedule-insns alone": Candidate(flags=f"{CURE} -fschedule-insns"),
    "sched-pressure alone": Candidate(flags=f"{CURE} -fsched-pressure"),
    "cllm -O2": Candidate(flags=SWITCHES, level="-O2"),
    "cllm unrolled": Candidate(flags=f"{SWITCHES} -funroll-loops"),
    "cllm LTO": Candidate(flags=f"{SWITCHES} -flto=auto"),
    "cllm PGO": Candidate(flags=SWITCHES, trains=True),
    "cllm 512 bits": Candidate(flags=f"{SWITCHES} -mprefer-vector-width=512", needs="avx512f"),
    "cllm 256 bits": Candidate(flags=f"{SWITCHES} -mprefer-vector-width=256", needs="avx512f"),
    "gcc-11": Candidate("gcc-11", "g++-11", SWITCHES),
    "clang-14": Candidate("clang-14", "clang++-14", "-w"),
    "clang-16": Candidate("clang-16", "clang++-16", "-w"),
    "clang-19": Candidate("clang-19", "clang++-19", "-w"),
    "AVX2 default": Candidate(native=False),
    "AVX2 cllm": Candidate(flags=SWITCHES, native=False),
    "AVX2 clang-19": Candidate("clang-19", "clang++-19", "-w", native=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("models/qwen3-0.6b.gguf"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument(
        "--only", nargs="+", choices=CANDIDATES, default=[*CANDIDATES], metavar="NAME"
    )
    parser.add_argument(
        "--build-only", action="store_true", help="build what is missing and measure nothing"
    )
    parser.add_argument("--json", type=Path, help="a file for all that was measured")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.model, options.threads)))
        return
    for path, cure in (
        (options.model, "cllm bench make-model"),
        (SOURCE, "python benchmarks/build_peers.py"),
    ):
        if not path.exists():
            sys.exit(f"{path} is missing: {cure}")
    libraries = {}
    for name in dict.fromkeys([BASE, *options.only]):
        if reason := why_not(CANDIDATES[name]):
            print(f"skipped: {name}: {reason}", flush=True)
        else:
            libraries[name] = build(name, CANDIDATES[name], options)
    if options.build_only:
        return
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in libraries}
    for i in range(options.rounds):
        for name in libraries if i % 2 == 0 else reversed(libraries):
            runs[name].append(measured(libraries[name], options))
    print(report(runs))
    if options.json:
        options.json.write_text(
            json.dumps({"cpu": describe_cpu(), "results": runs}, indent=2) + "\n"
        )


# --- building -----------------------------------------------------------------------------------


def why_not(candidate: Candidate) -> str:
    """Return why a candidate cannot be tried here, or "" if it can."""
    if not shutil.which(candidate.cxx):
        return f"{candidate.cxx} is not installed"
    return (
        f"the CPU has no {candidate.needs}"
        if candidate.needs and candidate.needs not in read_cpu_flags()
        else ""
    )


def build(name: str, candidate: Candidate, options: argparse.Namespace) -> Path:
    """Build a candidate.

    Return a folder with the installed libraries and this candidate's ggml-cpu.
    """
    folder = (BUILDS / name.replace(" ", "-")).absolute()
    libraries = folder / "lib"
    if (libraries / "done").exists():
        return libraries
    print(f"building: {name}", flush=True)
    profile = "-fprofile-generate -fprofile-update=atomic" if candidate.trains else ""
    compile_in(folder, candidate, profile)
    collect(folder, libraries)
    if candidate.trains:
        measured(libraries, options)  # writes the profile next to the object files
        compile_in(folder, candidate, "-fprofile-use -fprofile-correction -Wno-missing-profile")
        collect(folder, libraries)
    (libraries / "done").touch()
    return libraries


def compile_in(folder: Path, candidate: Candidate, profile: str) -> None:
    flags = f"{candidate.flags} {profile}"
    definitions = [*OPTIONS, "CMAKE_BUILD_TYPE=Release", f"CMAKE_CXX_COMPILER={candidate.cxx}"]
    definitions += [
        f"GGML_NATIVE={'ON' if candidate.native else 'OFF'}",
        f"CMAKE_C_COMPILER={candidate.cc}",
        f"CMAKE_CXX_FLAGS={flags}",
        f"CMAKE_C_FLAGS={candidate.c_flags} {profile}",
    ]
    definitions += [
        f"CMAKE_{language}_FLAGS_RELEASE={candidate.level} -DNDEBUG" for language in ("C", "CXX")
    ]
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(BUILDS.absolute())}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "build.log").open("w") as log:
        for command in (
            [
                "cmake",
                "-S",
                SOURCE,
                "-B",
                folder / "build",
                *(f"-D{definition}" for definition in definitions),
            ],
            [
                "cmake",
                "--build",
                folder / "build",
                "--parallel",
                os.cpu_count(),
                "--target",
                "ggml-cpu",
            ],
        ):
            done = subprocess.run(
                list(map(str, command)), env=environment, stdout=log, stderr=log, check=False
            )
            if done.returncode:
                sys.exit(f"the build failed, see the end of {log.name}")


def collect(folder: Path, libraries: Path) -> None:
    import llama_cpp

    shutil.copytree(
        Path(llama_cpp.__file__).parent / "lib", libraries, symlinks=True, dirs_exist_ok=True
    )
    for path in libraries.glob("libggml-cpu*"):
        path.unlink()
    for path in (folder / "build" / "bin").glob("libggml-cpu*"):
        shutil.copy(path, libraries / path.name, follow_symlinks=False)


# --- measuring ----------------------------------------------------------------------------------


def measured(libraries: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of ``measure`` in a process that loads ``libraries``."""
    command = [
        sys.executable,
        __file__,
        "--measure",
        "--model",
        options.model,
        "--threads",
        options.threads,
    ]
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(libraries)}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{libraries.parent.name} does not run ({done.returncode}): {done.stderr[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(model: Path, threads: int) -> dict[str, Any]:
    """Return tokens/s of prefill and decoding, and a digest of all logits."""
    from cllm.backends.llama_cpp.options import Options
    from cllm.core.batch import Batch, Row, Trim
    from cllm.core.params import SamplingParams
    from cllm.core.request import Request
    from cllm.core.sequence import Sequence
    from cllm.engine.build import build_backend
    from cllm.engine.params import EngineParams

    params = EngineParams(
        path=str(model),
        context_length=2 * PREFILL_TOKENS,
        max_num_seqs=max(DECODING),
        layout="partitioned",
        kv_memory=1 << 40,
        options=Options(n_threads=threads).model_dump(),
    )
    backend = build_backend(params)
    digest, result = hashlib.sha256(), {}

    def sequences(count: int, length: int) -> list[Sequence]:
        seqs = []
        for i in range(count):
            prompt = [
                (7919 * (i + 1) * (j + 1)) % (backend.info.vocabulary_size - 300)
                for j in range(length)
            ]
            seqs.append(
                Sequence(
                    Request(str(i), prompt, SamplingParams()), 0, 0, backend.info.context_length
                )
            )
            seqs[-1].seq_id = i
        return seqs

    def forward(seqs: list[Sequence], start: int, count: int) -> float:
        trims = [Trim(seq.seq_id, start) for seq in seqs] if start == 0 else []
        begun = time.perf_counter()
        logits = backend.forward(Batch([Row(seq, start, count, 1) for seq in seqs], trims))
        seconds = time.perf_counter() - begun
        for row in logits:
            digest.update(row.tobytes())
        return seconds

    long = sequences(1, PREFILL_TOKENS)
    forward(long, 0, PREFILL_TOKENS)  # touches the weights
    result["prefill"] = 2 * PREFILL_TOKENS / sum(forward(long, 0, PREFILL_TOKENS) for _ in range(2))
    for count in DECODING:
        seqs = sequences(count, 16 + DECODE_STEPS)
        forward(seqs, 0, 16)
        result[f"decode {count}"] = (
            count * DECODE_STEPS / sum(forward(seqs, 16 + i, 1) for i in range(DECODE_STEPS))
        )
    return {**result, "logits": digest.hexdigest()[:12], "system": backend.info.system}


def report(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return a Markdown table: ratios to the default build, as median (least to most), and whether
    the logits agree.
    """
    columns = ["prefill", *(f"decode {count}" for count in DECODING)]
    lines = [f"CPU: {describe_cpu()}. llama.cpp uses: {results[BASE][0]['system']}", ""]
    lines += [
        "| build | " + " | ".join(columns) + " | logits |",
        "| --- |" + " ---: |" * len(columns) + " --- |",
    ]
    for name, runs in results.items():
        cells = []
        for column in columns:
            ratios = [
                run[column] / base[column] for run, base in zip(runs, results[BASE], strict=True)
            ]
            middle = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            cells.append(
                f"{statistics.median(run[column] for run in runs):.1f}/s"
                if name == BASE
                else middle
            )
        same = {run["logits"] for run in runs} == {results[BASE][0]["logits"]}
        lines.append(f"| {name} | {' | '.join(cells)} | {'the same' if same else 'other'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
