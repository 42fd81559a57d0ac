"""Paged memory under llama.cpp: its states, its limits, and what happens where it is impossible."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cllm import LLM
from cllm.backends.llama_cpp.mappings import map_file
from cllm.backends.params import BackendParams
from cllm.core.batch import Batch, Copy, Drop, Load, Row, Save, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.errors import EngineError, StartupError
from cllm.models.gguf import read_header
from cllm.models.sequence_memory import compute_kv_bytes_per_token

pytestmark = [
    pytest.mark.llama,
    pytest.mark.skipif(sys.platform != "linux", reason="paged memory needs Linux"),
]

CONTEXT, NUM_SEQS = 512, 3
TOLERANCE = 0.1  # of the standard deviation of the logits
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[(7 * i + j) % 200 + 20 for j in range(40 + 30 * i)] for i in range(4)]


@pytest.fixture
def make_backend(builtin_path: Path) -> Iterator[Callable]:
    """Return ``make(path, layout, **params)``; the backends are closed after the test."""
    from cllm.backends.llama_cpp.backend import LlamaCppBackend
    from cllm.backends.llama_cpp.options import Options

    made = []

    def make(path: Path = builtin_path, layout: str = "paged", **params) -> LlamaCppBackend:
        kv_type = params.get("kv_type", "f16")
        sizes = {
            "context_length": CONTEXT,
            "max_num_seqs": NUM_SEQS,
            "kv_bytes_per_token": compute_kv_bytes_per_token(read_header(path), kv_type) or 0,
        }
        options = Options(n_threads=1, n_gpu_layers=0).model_dump()
        made.append(
            LlamaCppBackend(
                BackendParams(path=str(path), layout=layout, options=options, **(sizes | params))
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def forward(backend, seq_id: int, tokens: list[int], start: int = 0, operations=()) -> np.ndarray:
    """Compute ``tokens`` from ``start`` on; return the logits after the last one."""
    seq = Sequence(Request("A", [0], SamplingParams()), 0, 0, CONTEXT)
    seq.seq_id, seq.tokens = seq_id, tokens
    row = Row(seq, start, len(tokens) - start, 1)
    return np.array(backend.forward(Batch([row], operations))[0])


def assert_same(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() < TOLERANCE * expected.std()


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(50, 200), k=count)


# --- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "kv_type"),
    [
        ("", "f16"),
        ("", "q8_0"),
        ("deci", "f16"),
        ("deepseek2", "f16"),
        ("gemma3", "f16"),
        ("gpt-oss", "f16"),
    ],
)
def test_states_are_those_of_llama_cpp(make_backend, tiny_model, builtin_path, kind, kv_type):
    """Also of prefixes in several parts, of layers with different sizes, and without values."""
    path = tiny_model(kind) if kind else builtin_path
    backend = make_backend(path, kv_type=kv_type)
    assert backend.info.layout == "paged"
    tokens = words(300)
    for length in (1, 2, 63, 64, 255, 256, 257, 300):
        operations = [Trim(0, 0), Drop(1)]
        half = length // 2
        if half:  # the second half is in another part
            forward(backend, 1, tokens[:half], operations=[Trim(1, 0)])
            operations += [Copy(1, 0, half)]
        forward(backend, 0, tokens[:length], half, operations)
        backend.forward(Batch([], [Save(0, 1)]))
        expected = backend._cells._states.save(0)
        found = backend._cells._paged_states.make(1)
        assert np.array_equal(found, expected), length
    backend.forward(Batch([], [Trim(0, 0), Save(0, 1)]))
    assert np.array_equal(backend._cells._paged_states.make(1), backend._cells._states.save(0))


@pytest.mark.parametrize("kind", ["deci", "deepseek2", "gemma3", "gpt-oss"])
def test_models_of_other_shapes_compute_the_same(make_backend, tiny_model, kind):
    """In chunks, and with shared, saved and trimmed prefixes."""
    tokens, other = words(300), words(100, seed=1)
    plain, paged = (make_backend(tiny_model(kind), layout) for layout in ("partitioned", "paged"))
    assert (plain.info.layout, paged.info.layout) == ("partitioned", "paged")
    expected = forward(plain, 0, tokens)
    assert_same(forward(paged, 0, tokens), expected)
    paged.forward(Batch([], [Copy(0, 1, 200), Save(0, 5), Trim(0, 0), Load(5, 2, 100)]))
    assert_same(forward(paged, 1, tokens, 200), expected)
    assert_same(forward(paged, 2, tokens, 100), expected)
    assert_same(
        forward(paged, 2, tokens[:50] + other, 50, [Trim(2, 50)]),
        forward(plain, 1, tokens[:50] + other),
    )


def test_state_whose_cells_are_in_another_order_is_loaded(make_backend):
    """A pool gives a sequence any free cells. A part of the prefix can be shared afterwards."""
    tokens, unified, paged = words(200), make_backend(layout="unified"), make_backend()
    expected = forward(unified, 2, tokens)
    forward(unified, 0, words(64, seed=1), operations=[Trim(2, 0)])
    forward(unified, 1, tokens[:64])
    forward(unified, 1, tokens[:128], 64, [Trim(0, 0)])
    forward(unified, 1, tokens[:199], 128)
    unified.forward(Batch([], [Save(1, 0)]))
    data = bytes(unified.snapshot(0))
    places = np.frombuffer(data[4 : 4 + 199 * 12], np.int32).reshape(199, 3)[:, 0]
    assert (np.diff(places) < 0).any()
    buffer = paged.new_state_buffer(len(data))
    buffer.data[:] = data
    paged.install_snapshot(3, buffer, 199)
    assert bytes(paged.snapshot(3)) == data
    assert_same(forward(paged, 0, tokens, 199, [Load(3, 0, 199)]), expected)
    assert_same(forward(paged, 1, tokens, 100, [Copy(0, 1, 100)]), expected)
    assert bytes(paged.snapshot(3)) != data  # in order now


@pytest.mark.parametrize("damage", ["count", "owners", "positions", "type", "row", "layers"])
@pytest.mark.parametrize("kind", ["", "gpt-oss"])
def test_damaged_state_is_an_error(make_backend, builtin_path, tiny_model, damage, kind):
    """And nothing is shared or changed. The layers with a window are a second part of the state."""
    backend, tokens = make_backend(tiny_model(kind) if kind else builtin_path), words(20)
    forward(backend, 0, tokens)
    backend.forward(Batch([], [Save(0, 0)]))
    data = bytearray(backend.snapshot(0))
    cells_end = 4 + 12 * len(tokens)
    at = {
        "count": 0,
        "owners": 8,
        "positions": 4,
        "layers": cells_end + 4,
        "type": cells_end + 8,
        "row": cells_end + 12,
    }[damage]
    if kind:
        half = len(data) // 2
        assert data[:cells_end] == data[half : half + cells_end]
        at += half
    data[at] += 1
    buffer = backend.new_state_buffer(len(data))
    buffer.data[:] = data
    with pytest.raises(EngineError, match="a saved state is damaged"):
        backend.install_snapshot(1, buffer, len(tokens))
    backend._pages.check()
    assert_same(forward(backend, 1, tokens), forward(backend, 2, tokens))


def test_save_replaces_an_installed_snapshot(make_backend):
    backend = make_backend()
    forward(backend, 0, words(20))
    backend.forward(Batch([], [Save(0, 0)]))
    first = bytes(backend.snapshot(0))
    buffer = backend.new_state_buffer(len(first))
    buffer.data[:] = first
    backend.install_snapshot(0, buffer, 20)
    forward(backend, 0, words(30), operations=[Trim(0, 0)])
    backend.forward(Batch([], [Save(0, 0)]))
    assert len(backend.snapshot(0)) > len(first)
    backend.forward(Batch([], [Drop(0)]))
    with pytest.raises(KeyError):
        backend.snapshot(0)


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["", "gpt-oss"])
def test_memory_is_that_of_the_distinct_tokens(make_backend, builtin_path, tiny_model, kind):
    """Empty streams take none. With a sliding window, the tokens before it are kept, too."""
    backend = make_backend(tiny_model(kind) if kind else builtin_path, max_num_seqs=8)
    used, tokens = backend._pages, words(400)
    per_token = backend.info.kv_bytes_per_token
    assert used.num_bytes_used <= 64 * per_token  # of the first steps
    forward(backend, 0, tokens)
    one = used.num_bytes_used
    assert 400 * per_token <= one < 600 * per_token
    for seq_id in range(1, 8):
        operations = [Copy(0, seq_id, 390)]
        forward(backend, seq_id, [*tokens[:390], seq_id], 390, operations)
    assert used.num_bytes_used < one + 7 * 130 * per_token
    backend.forward(Batch([], [Save(0, 0), *(Trim(i, 0) for i in range(8))]))
    assert used.num_bytes_used < 600 * per_token
    backend.forward(Batch([], [Drop(0)]))
    assert used.num_bytes_used == 0


def test_other_buffers_take_memory_when_they_are_used(make_backend, monkeypatch):
    """As that of the logits, 67 MB for 64 sequences and a vocabulary of 262,144 tokens."""
    from cllm.backends.llama_cpp import ggml_memory

    renewed = []
    renew = ggml_memory.renew_pages

    def spy(address: int, size: int) -> bool:
        renewed.append(size)
        return renew(address, size)

    monkeypatch.setattr(ggml_memory, "renew_pages", spy)
    monkeypatch.setattr(ggml_memory, "NEW_PAGES_BYTES", 4096)
    info = make_backend().info
    assert info.layout == "paged"
    assert any(size >= 4 * info.max_num_seqs * info.vocabulary_size for size in renewed)


@pytest.mark.parametrize("kind", ["", "gpt-oss"])
def test_cells_take_little_memory_until_they_are_used(
    make_backend, builtin_path, tiny_model, monkeypatch, kind
):
    """llama.cpp has written 52 bytes for each; 36 of these are zero and given back."""
    from cllm.backends.llama_cpp import cells as module

    released = []

    def spy(*args: int) -> int:
        released.append(release_unused(*args))
        return released[-1]

    release_unused = module.release_unused
    monkeypatch.setattr(module, "release_unused", spy)
    path = tiny_model(kind) if kind else builtin_path
    backend, tokens = make_backend(path, max_num_seqs=4, context_length=8192), words(100)
    assert released == [(2 if kind else 1) * 4 * 8192 * 36]
    expected = forward(make_backend(path, layout="partitioned"), 0, tokens)
    assert_same(forward(backend, 3, tokens), expected)
    assert_same(forward(backend, 0, tokens, 50, [Copy(3, 0, 50)]), expected)


@pytest.mark.parametrize("constant", ["CELLS_OWNER", "CELLS_WORDS", "VECTOR_BYTES"])
def test_cells_of_unknown_structure_keep_their_memory(make_backend, monkeypatch, constant):
    from cllm.backends.llama_cpp import cell_memory

    backend = make_backend()
    values = {"CELLS_OWNER": 21, "CELLS_WORDS": 1556, "VECTOR_BYTES": (4, 12, 4, 8)}
    monkeypatch.setattr(cell_memory, constant, values[constant])
    assert cell_memory.release_unused(backend._memory, 1, NUM_SEQS, CONTEXT) == 0


def test_cells_that_are_in_use_keep_their_memory(make_backend):
    """They are not zero."""
    from cllm.backends.llama_cpp.cell_memory import release_unused

    backend, tokens = make_backend(context_length=8192, max_num_seqs=1), words(100)
    expected = forward(backend, 0, tokens)
    forward(backend, 0, tokens[:99], operations=[Trim(0, 0)])
    assert release_unused(backend._memory, 1, 1, 8192) == 8192 * 4  # the shifts
    assert_same(forward(backend, 0, tokens, 99), expected)


def usage() -> tuple[int, int]:
    """Return the number of open files, and of mappings of paged memory."""
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("cllm-kv")
    return len(list(Path("/proc/self/fd").iterdir())), mappings


REPEATED = """
import ctypes, gc, pathlib
from cllm import LLM
from cllm.core.params import SamplingParams
names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo2
used = []
for _ in range(10):
    llm = LLM(model_max_context_length=2048, scheduler_max_num_seqs=8)
    assert llm.info.layout == "paged"
    llm.generate([[50 + i] * 100 for i in range(8)], SamplingParams(max_tokens=8))
    llm.close()
    llm.close()
    llm._backend.close()
    del llm
    gc.collect()
    files = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    maps = pathlib.Path("/proc/self/maps").read_text().count("cllm-kv")
    heap = mallinfo2()
    used.append((files, maps, heap.uordblks + heap.hblkhd))
assert used[-1][:2] == used[0][:2] == (used[0][0], 0)
print(used[-1][2] - used[3][2])
"""


def test_engines_that_are_opened_and_closed_leave_nothing_behind(builtin_path):
    """No files, no mappings, and no memory. A second close does nothing.

    The C heap's bytes in use are counted, since resident memory also grows when another of its
    arenas happens to be used.
    """
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("only glibc tells how much of its heap is in use")
    command = [sys.executable, "-c", REPEATED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200_000  # bytes


def test_reopening_leaves_nothing_behind(make_backend):
    backend, tokens = make_backend(), words(100)
    expected, before = forward(backend, 0, tokens), usage()
    for layout in ("unified", "paged") * 3:
        backend.reopen(BackendParams(**{**_fields(backend), "layout": layout}))
        assert backend.info.layout == layout
        assert_same(forward(backend, 0, tokens), expected)
    assert usage() == before


def _fields(backend) -> dict:
    return {name: getattr(backend._params, name) for name in BackendParams.__struct_fields__}


def test_engines_of_several_threads_do_not_disturb_each_other():
    """They open their contexts at the same time, of the same size and others."""
    with LLM(model_max_context_length=512, scheduler_max_num_seqs=4) as llm:
        expected = [each.text for each in llm.generate(PROMPTS, GREEDY)]
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def run(context: int) -> None:
        try:
            start.wait()
            for _ in range(3):
                with LLM(model_max_context_length=context, scheduler_max_num_seqs=4) as llm:
                    assert llm.info.layout == "paged"
                    assert [each.text for each in llm.generate(PROMPTS, GREEDY)] == expected
        except BaseException as error:  # noqa: BLE001  # of another thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in (512, 512, 768, 1024)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_requests_survive_refused_memory(monkeypatch):
    """Their sequences are computed again."""
    from cllm.backends.llama_cpp import paged_memory

    shared = words(60)
    prompts = [[*shared, *words(20 + i, seed=i)] for i in range(6)]
    options = {"model_max_context_length": 512, "scheduler_max_num_seqs": 3}
    with LLM(**options) as llm:
        expected = [each.text for each in llm.generate(prompts, GREEDY)]
        calls = itertools.count()

        def refuse_some(*args, **named) -> None:
            if next(calls) % 50 == 49:
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            map_file(*args, **named)

        monkeypatch.setattr(paged_memory, "map_file", refuse_some)
        again = [each.text for each in llm.generate(prompts, GREEDY)]
        assert again == expected
        assert next(calls) > 100
        llm._backend._pages.check()  # type: ignore[attr-defined]


# --- where it is impossible ---------------------------------------------------------------------


def test_unexpected_size_is_measured(make_backend, caplog):
    """A header may not say everything. The memory is divided by what a token really takes."""
    real = make_backend().info
    for wrong in (real.kv_bytes_per_token // 2, real.kv_bytes_per_token * 3, 0):
        info = make_backend(kv_bytes_per_token=wrong).info
        assert (info.layout, info.kv_bytes_per_token) == ("paged", real.kv_bytes_per_token)
        assert info.fingerprint == real.fingerprint
    assert caplog.messages == []


def test_unexpected_size_is_never_allocated(make_backend, monkeypatch):
    """It would be far more than the memory for the KV cache, and llama.cpp writes all of it."""
    from cllm.backends.llama_cpp import ggml_memory

    refused = []
    allocate = ggml_memory.KVAddresses.allocate

    def spy(self, buffer_type, size):
        buffer = allocate(self, buffer_type, size)
        refused.extend([size] if buffer is None else [])
        return buffer

    monkeypatch.setattr(ggml_memory.KVAddresses, "allocate", spy)
    monkeypatch.setattr(ggml_memory, "MAX_UNEXPECTED_BYTES", 10_000_000)
    backend = make_backend(
        kv_bytes_per_token=100, context_length=8192, max_num_seqs=16, kv_memory=60_000_000
    )
    assert backend.info.layout == "paged"
    assert len(refused) == 1
    assert refused[0] == 8192 * 16 * backend.info.kv_bytes_per_token > 60_000_000


@pytest.mark.parametrize("layout", ["paged", "partitioned"])
def test_steps_do_not_register_tensors(make_backend, monkeypatch, layout):
    """Python would be called many times in each step."""
    from cllm.backends.llama_cpp import ggml_memory

    registered = []
    kind = ggml_memory.KVAddresses if layout == "paged" else ggml_memory.NewPages
    register = kind._register

    def spy(self, buffer, address):
        registered.append(address)
        return register(self, buffer, address)

    monkeypatch.setattr(kind, "_register", spy)
    monkeypatch.setattr(ggml_memory, "NEW_PAGES_BYTES", 4096)
    backend, tokens = make_backend(layout=layout), words(40)
    assert registered
    registered.clear()
    found = forward(backend, 0, tokens)
    assert registered == []
    assert_same(found, forward(make_backend(layout="unified"), 0, tokens))


def deny_pages(self, *_, **__) -> None:
    from cllm.backends.llama_cpp.paged_memory import NotPaged

    raise NotPaged("the test denies it")


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("paged_memory.PagedMemory", "__init__"),
        ("ggml_memory.KVAddresses", "find_rows"),
        ("states.PagedStates", "__init__"),
        ("cells.PagedCells", "check_states"),
    ],
)
def test_other_layout_serves_where_paged_memory_is_denied(
    make_backend, monkeypatch, caplog, place, name
):
    """With a warning. If paged was asked for, it is an error instead."""
    monkeypatch.setattr(f"cllm.backends.llama_cpp.{place}.{name}", deny_pages)
    backend = make_backend(layout="auto")
    assert backend.info.layout == "partitioned"
    assert caplog.messages == ["the KV cache has no paged memory: the test denies it"]
    tokens = words(30)
    assert_same(forward(backend, 0, tokens), forward(backend, 1, tokens))
    with pytest.raises(StartupError, match=r"kv\.layout cannot be paged: the test denies it"):
        make_backend()


def test_state_of_another_form_is_noticed(make_backend, monkeypatch, caplog):
    """As of models with positions in several dimensions."""
    from cllm.backends.llama_cpp.states import PagedStates

    monkeypatch.setattr(PagedStates, "make", lambda *_: np.zeros(8, np.uint8))
    assert make_backend(layout="auto").info.layout == "partitioned"
    assert "this model's state has another form" in caplog.text


def test_windows_without_a_cache_of_their_own_are_not_paged(make_backend, monkeypatch, caplog):
    """Nothing is known of the tokens that such a state may lack."""
    from llama_cpp import llama_cpp as lib

    monkeypatch.setattr(lib, "llama_model_n_swa", lambda _: 32)
    backend, tokens = make_backend(layout="auto"), words(30)
    assert (backend.info.layout, backend.info.checks_states) == ("partitioned", False)
    assert "this model's state has another form" in caplog.text
    expected = forward(backend, 0, tokens)
    assert_same(forward(backend, 1, tokens, 20, [Save(0, 0), Load(0, 1, 20)]), expected)


def test_unknown_version_of_ggml_has_no_paged_memory(make_backend, monkeypatch, caplog):
    """It is not tried, so there is no warning."""
    from cllm.backends.llama_cpp import ggml_memory

    monkeypatch.setattr(ggml_memory, "ggml", None)
    assert make_backend(layout="auto").info.layout == "partitioned"
    assert caplog.messages == []
    with pytest.raises(StartupError, match=r"kv\.layout is paged, which needs Linux"):
        make_backend()


@pytest.mark.parametrize("field", ["BUFT_GET_NAME", "BUFFER_CONTEXT", "BUFFER_SIZE"])
def test_changed_structures_of_ggml_are_noticed(builtin_path, monkeypatch, field):
    """The field is at another place. The functions there return something else."""
    from cllm.backends.llama_cpp import ggml_memory

    assert ggml_memory._load_ggml() is not None
    if field == "BUFT_GET_NAME":
        monkeypatch.setattr(ggml_memory, "GetName", lambda _: lambda _: b"other")
    else:
        monkeypatch.setattr(ggml_memory, field, 11)
    assert ggml_memory._load_ggml() is None


LIMITED = """
import logging, resource, sys
logging.basicConfig(format="%(message)s")
from cllm import LLM
from cllm.core.params import SamplingParams
{limit}
with LLM(**{options}) as llm:
    done = llm.generate([[50, 60, 70]], SamplingParams(temperature=0, max_tokens=4))
    print(llm.info.layout, len(done[0].outputs[0].tokens))
"""


def run_limited(limit: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Generate in a process with a limit of the system."""
    script = LIMITED.format(limit=limit, options=options)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_limit_of_file_sizes_leads_to_another_layout(builtin_path):
    """If paged was asked for, it is an error of one line."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))"
    done = run_limited(limit)
    assert done.returncode == 0, done.stderr
    reason = "the system provides no file in memory: File too large"
    assert done.stderr == f"the KV cache has no paged memory: {reason}\n"
    assert done.stdout.split() == ["partitioned", "4"]
    done = run_limited(limit, kv_layout="paged")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.endswith(f"StartupError: kv.layout cannot be paged: {reason}")


def test_limit_of_addresses_leads_to_another_layout(builtin_path):
    """ulimit -v allows the memory of the model, but not the addresses of all streams."""
    limit = """
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = used + (700 << 20)
resource.setrlimit(resource.RLIMIT_AS, (room, room))
"""
    done = run_limited(limit, model_max_context_length=32768, kv_max_memory_mb=200)
    assert done.returncode == 0, done.stderr
    assert "the KV cache has no paged memory: cannot create a context" in done.stderr
    assert done.stdout.split() == ["unified", "4"]
