"""The memory of a KV cache that cannot be paged."""

from __future__ import annotations

import json
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
