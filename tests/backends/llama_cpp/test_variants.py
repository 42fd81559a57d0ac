"""The choice among the CPU kernels of a build that has several variants of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from cllm.backends.llama_cpp.variants import FILE_NAME, load_backends, name_variant
from cllm.errors import StartupError


def library_with(cpus: list[int | None]) -> SimpleNamespace:
    """Return a stand-in for libllama that finds these CPU devices, one in each call.

    ``loaded``: the folders from which it was told to load.
    """
    library = SimpleNamespace(loaded=[])

    def find(kind: int) -> int | None:
        return cpus.pop(0)

    def load(folder: bytes) -> None:
        library.loaded.append(folder)

    library.ggml_backend_dev_by_type = find
    library.ggml_backend_load_all_from_path = load
    return library


def test_build_with_its_own_kernels_loads_no_file(tmp_path) -> None:
    library = library_with([4711])
    load_backends(library, tmp_path)
    assert library.loaded == []


def test_kernels_are_loaded_from_the_folder_of_the_library(tmp_path, monkeypatch) -> None:
    """Not from the current one."""
    monkeypatch.chdir("/")
    library = library_with([None, 4711])
    load_backends(library, tmp_path)
    assert library.loaded == [os.fsencode(tmp_path)]


def test_folder_without_kernels_is_a_startup_error(tmp_path) -> None:
    with pytest.raises(StartupError, match="has none") as raised:
        load_backends(library_with([None, None]), tmp_path)
    assert "\n" not in str(raised.value)


def test_error_has_the_reason_of_the_loader(tmp_path) -> None:
    """Such as a missing library, or a C library that is too old."""
    (tmp_path / "libggml-cpu-x64.so").write_text("not a library, but long enough for a header")
    with pytest.raises(StartupError, match=r"libggml-cpu-x64\.so: .*reinstall"):
        load_backends(library_with([None, None]), tmp_path)


def test_library_without_these_functions_stays_as_it_is(tmp_path) -> None:
    load_backends(SimpleNamespace(), tmp_path)


@pytest.mark.parametrize(
    ("file", "variant"),
    [
        ("/a/lib/libggml-cpu-haswell.so", "haswell"),
        ("/a/lib/libggml-cpu-armv8.2_1.so", "armv8.2_1"),
        ("/a/lib/libggml-cpu.so.0", ""),
        ("/a/lib/libggml-cpu.so", ""),
    ],
)
def test_variant_is_named_after_its_file(file, variant) -> None:
    assert name_variant(Path(file)) == variant


@pytest.mark.llama
def test_file_of_the_kernels_in_use_is_found() -> None:
    library = pytest.importorskip("cllm.backends.llama_cpp.library")
    kernels = library.find_kernels(library.lib._lib)
    assert kernels.parent.samefile(library.FOLDER)
    assert "ggml-cpu" in kernels.name
    assert library.cpu_variant() in {"", *VARIANTS}


def list_variants() -> dict[str, Path]:
    """Return the variants of the installed build, without loading it."""
    spec = find_spec("llama_cpp")
    folders = spec.submodule_search_locations if spec is not None else None
    files = (
        file for folder in folders or () for file in (Path(folder) / "lib").glob("*ggml-cpu-*")
    )
    return {match[1]: file for file in files if (match := FILE_NAME.match(file.name))}


VARIANTS = list_variants()
QUESTIONS = 48
ANSWER = f"""
import itertools, json
from cllm import LLM, SamplingParams
from cllm.backends.llama_cpp.library import cpu_variant
from cllm.models.builtin.questions import held_out_questions

kinds = ["sums", "capitals", "alphabet", "days", "months", "colours", "emoji", "spelling"]
questions = [*itertools.islice(held_out_questions(7, kinds), {QUESTIONS})]
with LLM(model_max_context_length=512) as llm:
    prompts = [llm.encode_chat(question.messages) for question in questions]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=80))
pairs = zip(questions, outputs, strict=True)
wrong = [(q.messages[-1]["content"], out.text) for q, out in pairs if out.text.strip() != q.answer]
print(json.dumps([cpu_variant(), wrong]))
"""


@pytest.mark.llama
@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    sorted(VARIANTS)
    or [
        pytest.param(
            "none", marks=pytest.mark.skip(reason="the installed llama.cpp has one set of kernels")
        )
    ],
)
def test_each_variant_for_this_cpu_answers_correctly(variant, tmp_path) -> None:
    """In a copy of the libraries that has no other variant."""
    lib = VARIANTS[variant].parent
    alone = tmp_path / "llama_cpp" / "lib"
    others = [file.name for name, file in VARIANTS.items() if name != variant]
    shutil.copytree(lib, alone, ignore=shutil.ignore_patterns(*others))
    bundled = lib.parents[1] / "llama_cpp_python.libs"  # libgomp
    if bundled.exists():
        (tmp_path / bundled.name).symlink_to(bundled)
    environ = {**os.environ, "LLAMA_CPP_LIB_PATH": str(alone)}
    done = subprocess.run(
        [sys.executable, "-c", ANSWER], env=environ, capture_output=True, text=True, check=False
    )
    if "has none for this CPU" in done.stderr:
        pytest.skip(f"this CPU cannot run {variant}")
    assert done.returncode == 0, done.stderr
    used, wrong = json.loads(done.stdout.splitlines()[-1])
    assert used == variant
    assert len(wrong) <= 0.05 * QUESTIONS, wrong
