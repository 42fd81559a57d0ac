"""``cllm cluster front``: what it says when it cannot start."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

FRONT = ("cluster", "front", "--port", "0")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "name the replicas with --urls"),
        (("--urls", "ftp://a"), "'ftp://a' cannot be used: it is not an HTTP URL"),
        (("--urls", "10.0.0.5:8000"), "cannot be used"),
        (("--urls", "http://a:8000,http://"), "'http://' cannot be used"),
        (("--urls", "http://a:99999"), "'http://a:99999' cannot be used"),
        (("--urls", "http://a", "--cluster.key", "short"), "at least 16 characters"),
        (("--urls", "http://a", "--cluster.lease-seconds", "1"), "must be a number from 1.5"),
        (("--urls", "http://a", "--cluster.key-file", "/dev/null/x"), "the cluster key cannot"),
        (("--urls", "http://a", "--host", "0.0.0.0"), "requests need API keys"),
    ],
)
def test_front_that_cannot_start_says_why_in_one_line(cllm, flags, text):
    result = cllm(*FRONT, *flags)
    assert result.code == 2
    assert text in result.err
    assert result.err.startswith("cllm: ")
    assert result.err.count("\n") == 1


def test_port_that_is_in_use_is_named(cllm):
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        result = cllm("cluster", "front", "--urls", "http://a:1", "--port", port)
    assert (result.code, result.err) == (
        2,
        f"cllm: port {port} on 127.0.0.1 is in use; choose another with --port\n",
    )


def test_help_names_the_flags_that_matter(cllm):
    out = cllm("cluster", "front", "--help").out
    for flag in ("--urls", "--host", "--port", "--cluster.key-file", "--server.keys-file"):
        assert flag in out
    assert "--model.path" not in out
