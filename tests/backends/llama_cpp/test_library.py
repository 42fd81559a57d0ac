"""The log and the aborts of libllama."""

import logging
import signal
import subprocess
import sys

import pytest

pytest.importorskip("llama_cpp")

from cllm.backends.llama_cpp import library
from cllm.cli.remarks import capacity
from cllm.core.params import SamplingParams
from cllm.local.llm import LLM

pytestmark = pytest.mark.llama


@pytest.mark.parametrize(
    ("level", "shown"), [(0, False), (1, False), (library.LOG_LEVEL_INFO, True), (5, False)]
)
def test_debug_lines_are_not_logged(caplog, level, shown):
    """There are thousands of them for a large vocabulary."""
    with caplog.at_level(logging.DEBUG, logger="cllm.llama_cpp"):
        library._log(level, b"hello\n", None)
    assert [record.message for record in caplog.records] == ["hello"] * shown


ABORT = """
import ctypes, logging, os
from cllm.backends.llama_cpp import library
logging.basicConfig(format="%(message)s")
with library.aborts(lambda reason: os.write(1, reason.encode())):
    library.lib._lib.ggml_abort(b"/far/away/file.cpp", ctypes.c_int(7), b"what is wrong")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the symbol lies in another library")
def test_abort_is_reported_in_one_line_before_the_process_ends():
    """The line contains neither llama.cpp's build folder nor its own message."""
    done = subprocess.run(
        [sys.executable, "-c", ABORT], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGABRT
    assert done.stdout == "file.cpp:7: what is wrong"
    assert done.stderr == "llama.cpp aborts: file.cpp:7: what is wrong\n"


@pytest.fixture
def own_kernels():
    if not library.attention_kernel():
        pytest.skip("this llama.cpp was built without native/")
    yield
    library.use_own_kernels(on=True)


def test_own_kernels_can_be_turned_off_and_on(own_kernels):
    library.use_own_kernels(on=False)
    assert library.attention_kernel() == ""
    library.use_own_kernels(on=True)
    assert library.attention_kernel() in {"AVX2", "AVX-512", "NEON"}


@pytest.mark.parametrize(("kernels", "ours"), [("auto", True), ("off", False)])
def test_option_chooses_the_attention_kernel(own_kernels, kernels, ours):
    with LLM(scheduler_max_num_seqs=1, backend_llama_cpp_kernels=kernels) as llm:
        assert bool(llm.info.attention) == ours
        assert ("cLLM's attention" in capacity(llm.info)) == ours
        question = [{"role": "user", "content": "What is 27 plus 45?"}]
        answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=8))
        assert answer.text == "72"
