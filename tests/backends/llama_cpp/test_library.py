"""The log and the aborts of libllama."""

import logging
import signal
import subprocess
import sys

import pytest

pytest.importorskip("llama_cpp")

from cllm.backends.llama_cpp import library

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
