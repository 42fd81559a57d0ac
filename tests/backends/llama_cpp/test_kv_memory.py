"""The memory of a KV cache that cannot be paged."""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys

import pytest
from conftest import PATIENCE

pytestmark = [
    pytest.mark.llama,
    pytest.mark.skipif(sys.platform != "linux", reason="the memory is read from /proc"),
]

# a process of its own, so that no other test has left memory that is used again
MEASURE = """
import json, sys
from cllm import LLM, SamplingParams

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

model, settings = json.loads(sys.argv[1])
with LLM(model, **settings | {"scheduler_max_num_seqs": 1, "model_max_context_length": 256}) as small:
    small.generate([5] * 9, SamplingParams(max_tokens=4, ignore_eos=True))
before = resident()
llm = LLM(model, kv_max_memory_mb=600, **settings)
loaded = resident() - before
texts = [one.text for one in llm.generate([[5] * 9] * 2, SamplingParams(temperature=0))]
info = llm.info
assert len(set(texts)) == 1
print(json.dumps([info.layout, info.num_cells * info.kv_bytes_per_token, loaded, resident() - before]))
"""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("gemma3", "partitioned"), ("", "partitioned"), ("", "unified")],
)
def test_kv_cache_takes_memory_only_for_the_tokens_it_had(builtin_path, tiny_model, kind, layout):
    """llama.cpp fills it with zeros at the start, also the parts that no sequence will use."""
    path = tiny_model(kind) if kind else builtin_path
    settings = {"kv_layout": layout, "model_max_context_length": 8192}
    job = json.dumps([str(path), settings | {"scheduler_max_num_seqs": 64}])
    child = subprocess.run(
        [sys.executable, "-c", MEASURE, job], capture_output=True, timeout=PATIENCE, check=False
    )
    assert child.returncode == 0, child.stderr.decode()
    used_layout, num_bytes, loaded, used = json.loads(child.stdout)
    assert used_layout == layout
    assert num_bytes > 200_000_000
    assert max(loaded, used) < num_bytes / 4


def test_memory_that_was_used_before_is_zero_again(monkeypatch):
    """Allocators such as jemalloc, or glibc with MALLOC_MMAP_THRESHOLD_, return freed memory."""
    from cllm.backends.llama_cpp import ggml_memory

    if not ggml_memory.is_supported():
        pytest.skip("ggml's structures are not as known")
    size = ggml_memory.NEW_PAGES_BYTES + 64  # not whole pages
    memory = mmap.mmap(-1, size + 8192, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"\xff" * len(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 64
    buffer = ggml_memory.ggml.ggml_backend_cpu_buffer_from_ptr(address, size)
    monkeypatch.setattr(ggml_memory, "_allocate_with_ggml", lambda *_: buffer)
    assert ggml_memory.NewPages().allocate(0, size) == buffer
    assert memory[64 : 64 + size].count(0) == size
    assert memory[:64] + memory[64 + size :] == b"\xff" * (len(memory) - size)
    ggml_memory.ggml.ggml_backend_buffer_free(buffer)
