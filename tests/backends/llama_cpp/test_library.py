"""libllama's log in our hands."""

import logging

import pytest

pytest.importorskip("llama_cpp")

from cllm.backends.llama_cpp import library

pytestmark = pytest.mark.llama


@pytest.mark.parametrize(("level", "shown"), [(0, False), (1, False), (library.LOG_LEVEL_INFO, True), (5, False)])
def test_its_debug_lines_are_no_lines_of_ours(caplog, level, shown):
    """There are thousands of them for a large vocabulary."""
    with caplog.at_level(logging.DEBUG, logger="cllm.llama_cpp"):
        library._log(level, b"hello\n", None)
    assert [record.message for record in caplog.records] == ["hello"] * shown
