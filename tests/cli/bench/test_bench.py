"""``cllm bench``."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ollama_server import serving_ollama

from cllm.bench.bare_engine import PARTS
from cllm.bench.load.workload import WORKLOADS
from cllm.bench.make_model import QUANTS, SHAPES
from cllm.bench.stages import STAGES, SizeResult, StageResult
from cllm.cli.remote import server_url

STREAM = b"""\
data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null}]}

data: {"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}

data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}

data: [DONE]

"""


class Handler(BaseHTTPRequestHandler):
    """Serves the model "good" and no other."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200, b'{"data":[{"id":"good"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        good = body["model"] == "good" and self.headers["authorization"] == "Bearer secret"
        self.answer(200 if good else 404, STREAM if good else b"no such model [bold] here")

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("CLLM_API_KEY", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


LOAD = ("--requests", "3", "--concurrency", "2", "--max-tokens", "2")


def test_help_describes_bench_commands(cllm) -> None:
    _, out, _ = cllm("bench", "load", "--help")
    for option in (
        "--workload",
        "--requests",
        "--concurrency",
        "--max-tokens",
        "--prompt-words",
        "--shared-words",
    ):
        assert option in out
    for option in ("--api", "--plot", "--html", *WORKLOADS):
        assert option in out
    for option in ("--warmup", "--seed", "--timeout", "--model", "--api-key", "--json"):
        assert option in out
    assert "[env var: CLLM_API_KEY]" in out
    _, out, _ = cllm("bench", "make-model", "--help")
    assert all(choice in out for choice in (*SHAPES, *QUANTS, "--force"))
    _, out, _ = cllm("bench", "--help")
    assert "load" in out
    assert "make-model" in out


def test_load_prints_json(cllm, server: str) -> None:
    """stdout has one JSON object and nothing else. The command finds the model and the key by
    itself.
    """
    code, out, err = cllm("bench", "load", f"{server}/v1/", *LOAD, "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["url"], report["model"], report["num_succeeded"], report["output_tokens"]) == (
        server,
        "good",
        3,
        6,
    )
    assert report["settings"]["workload"] == "words"
    assert set(report["e2e_ms"]) == {"mean", "p50", "p95", "p99"}


def test_load_prints_table(cllm, server: str) -> None:
    code, out, _ = cllm("bench", "load", server, *LOAD)
    assert code == 0
    assert "3 of 3 requests succeeded" in out
    assert all(word in out for word in ("TTFT", "TPOT", "E2E", "p95", "output tokens/s", "s CPU"))


def test_load_ends_after_its_seconds_and_keeps_a_note(cllm, server: str, tmp_path: Path) -> None:
    sizes = ("--requests", "5000", "--prompt-words", "2", "--max-tokens", "2")
    more = ("--seconds", "0.3", "--note", "with 8 threads")
    code, out, _ = cllm("bench", "load", server, *sizes, *more, "--out", tmp_path / "a")
    assert code == 0
    assert "with 8 threads" in out
    report = json.loads((tmp_path / "a").read_text())
    assert 0 < report["num_succeeded"] == report["num_requests"] < 5000
    assert (report["note"], report["settings"]["seconds"]) == ("with 8 threads", 0.3)


def test_diff_compares_two_reports(cllm, server: str, tmp_path: Path) -> None:
    """The comparison shows settings that differ, and each figure with its ratio."""
    for name, options in (
        ("a", ("--ttft", "5000")),
        ("b", ("--rate", "50", "--arrivals", "even", "--ttft", "5000")),
    ):
        code, _, _ = cllm("bench", "load", server, *LOAD, *options, "--out", tmp_path / name)
        assert code == 0
    code, out, _ = cllm("bench", "diff", tmp_path / "a", tmp_path / "b")
    assert code == 0
    assert "rate: None before, 50.0 after" in out
    assert all(word in out for word in ("good requests/s", "TTFT p99 ms", "after / before"))
    (tmp_path / "c").write_text("{}")
    for wrong, word in (("c", "not a report"), ("d", "cannot be read")):
        code, out, err = cllm("bench", "diff", tmp_path / "a", tmp_path / wrong)
        assert (code, out) == (2, "")
        assert word in err


def test_load_and_diff_write_pictures_and_pages(cllm, server: str, tmp_path: Path) -> None:
    """Pictures show one run, or two runs from their reports. A wrong file name is reported before
    anything is measured.
    """
    files = ("--out", tmp_path / "a", "--plot", tmp_path / "a.svg", "--html", tmp_path / "a.html")
    assert cllm("bench", "load", server, *LOAD, *files)[0] == 0
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")
    assert "3 of 3 requests succeeded" in (tmp_path / "a.html").read_text()
    pages = ("--plot", tmp_path / "b.png", "--html", tmp_path / "b.html")
    assert cllm("bench", "diff", tmp_path / "a", tmp_path / "a", *pages)[0] == 0
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    assert "Two reports" in (tmp_path / "b.html").read_text()
    for option, path, word in (
        ("--plot", "a.jpg", ".svg"),
        ("--html", "none/a", "does not exist"),
        ("--out", "none/a", "no"),
    ):
        code, out, err = cllm("bench", "load", "http://127.0.0.1:1", *LOAD, option, tmp_path / path)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert word in err


def test_load_detects_ollama(cllm) -> None:
    with serving_ollama() as server:
        code, out, _ = cllm("bench", "load", server.url, *LOAD, "--api", "ollama", "--json")
        report = json.loads(out)
        assert (code, report["model"], report["num_succeeded"]) == (0, "good:latest", 3)
        assert report["settings"]["api"] == "ollama"
        code, _, err = cllm("bench", "load", server.url, *LOAD)
        assert (code, err.count("/v1/models answered 404")) == (2, 1)


def test_workloads_have_default_sizes(cllm, server: str) -> None:
    """In an overload all requests arrive together; a shared prefix is most of a prompt. Given sizes
    take precedence.
    """

    def settings(*options: str) -> dict:
        code, out, _ = cllm("bench", "load", server, "--max-tokens", "2", *options, "--json")
        assert code == 0
        return json.loads(out)["settings"]

    found = settings("--workload", "overload", "--requests", "20")
    assert (found["concurrency"], found["warmup"], found["shared_words"]) == (20, 8, 0)
    assert (
        settings("--workload", "overload", "--requests", "9", "--concurrency", "4")["concurrency"]
        == 4
    )
    assert settings("--workload", "shared-prefix", *LOAD[:2])["shared_words"] == 48
    assert (
        settings("--workload", "shared-prefix", *LOAD[:2], "--shared-words", "5")["shared_words"]
        == 5
    )


def test_options_override_preset(cllm, server: str) -> None:
    """The numbers of a preset are defaults."""
    code, out, _ = cllm(
        "bench", "load", server, "--preset", "seed-40x8x50", *LOAD[:2], *LOAD[4:], "--json"
    )
    assert code == 0
    settings = json.loads(out)["settings"]
    assert (settings["requests"], settings["concurrency"], settings["max_tokens"]) == (3, 8, 2)


def test_failed_requests_give_exit_code_1(cllm, server: str) -> None:
    code, out, _ = cllm("bench", "load", server, *LOAD, "--model", "bad")
    assert code == 1
    assert "3 failed: HTTP 404, such as: no such model [bold] here" in out
    code, out, _ = cllm("bench", "load", server, *LOAD, "--api-key", "wrong", "--json")
    assert code == 1
    assert json.loads(out)["failures"] == {"HTTP 404": 3}


def test_unreachable_server_gives_one_line(cllm) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        code, out, err = cllm("bench", "load", f"http://127.0.0.1:{taken.getsockname()[1]}", *LOAD)
    assert (code, out) == (2, "")
    assert err.startswith("cllm: http://127.0.0.1:")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--requests", "0"),
        ("--concurrency", "-1"),
        ("--workload", "none"),
        ("--shared-words", "65"),
        ("--timeout", "0"),
        ("--api-key", "a\nb"),
    ],
)
def test_invalid_arguments_give_one_line(cllm, server: str, arguments: tuple[str, ...]) -> None:
    code, out, err = cllm("bench", "load", server, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_url_is_normalized() -> None:
    assert server_url("localhost:8000") == "http://localhost:8000"
    assert server_url("https://host/prefix/v1/") == "https://host/prefix"


@pytest.mark.slow
def test_make_model_writes_file(cllm, tmp_path: Path) -> None:
    """The command prints what it made, and replaces a file only if asked to."""
    out_file = tmp_path / "tiny.gguf"
    arguments = ("bench", "make-model", "--shape", "tiny", "--quant", "f16", str(out_file))
    code, out, _ = cllm(*arguments)
    assert code == 0
    assert out.startswith(f"{out_file}: ")
    assert " MB in " in out
    size = out_file.stat().st_size
    out_file.write_bytes(b"mine")
    code, _, err = cllm(*arguments)
    assert (code, err) == (2, f"cllm: {out_file} already exists; use --force to replace it\n")
    assert out_file.read_bytes() == b"mine"
    assert cllm(*arguments, "--force")[0] == 0
    assert out_file.stat().st_size == size
    assert cllm(*arguments[:-1], str(tmp_path))[0] == 2


@pytest.mark.llama
def test_stages_tells_what_every_stage_loses(
    cllm, builtin_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result is a table or JSON. The exit code is 1 only if a stage loses more than the budget."""
    options = ["--sequences", "2", "--rounds", "1", "--max-tokens", "4", "--prompt-words", "3"]
    code, _, err = cllm("bench", "stages", "nowhere.gguf", *options)
    assert code == 2
    assert "nowhere.gguf" in err
    stages = [StageResult(stage, [100.0 - i]) for i, stage in enumerate(STAGES)]
    asked = []

    def measure(path, sizes, rounds, progress):
        asked.append((path, *((size.num_seqs, size.num_tokens) for size in sizes), rounds))
        return [SizeResult(2, stages, dict.fromkeys(PARTS, 1.0))]

    monkeypatch.setattr("cllm.bench.stages.run_stages", measure)
    code, out, _ = cllm(
        "bench",
        "stages",
        builtin_path,
        *options,
        "--budget",
        "0.999",
        "--plot",
        tmp_path / "stages.svg",
    )
    assert code == 0
    assert "share of the backend" in (tmp_path / "stages.svg").read_text()
    assert all(stage in out for stage in STAGES)
    assert "outside the decode" in out
    code, out, _ = cllm("bench", "stages", *options, "--json")
    assert code == 0
    assert [stage["stage"] for stage in json.loads(out)[0]["stages"]] == list(STAGES)
    assert asked == [(builtin_path, (2, 4), 1)] * 2
    assert cllm("bench", "stages", *options, "--budget", "0.001").code == 1


def test_compare_rejects_invalid_options_before_measuring(cllm, tmp_path: Path) -> None:
    """Each error is one line."""
    here = ("--out", tmp_path, "--store", tmp_path / "store.jsonl")
    (tmp_path / "wrong.json").write_text("[]\n")
    for options, word in (
        ((tmp_path / "none.gguf", *here), "none.gguf"),
        (("--rounds", "0", *here), "rounds"),
        (("--rows", "none", *here), "rows"),
        (("--minutes", "0", *here), "minutes"),
        (("--out", tmp_path / "none" / "page.md"), "does not exist"),
        (("--store", tmp_path / "none" / "a.jsonl", "--out", tmp_path), "does not exist"),
        (("--store", tmp_path / "wrong.json", "--out", tmp_path), "no rounds"),
        (("--from", tmp_path / "none.json", *here), "cannot be read"),
        (("--from", tmp_path / "wrong.json", *here), "no rounds"),
        (("--build", "--peers", tmp_path, *here), "cannot be combined with --peers"),
    ):
        code, out, err = cllm("bench", "compare", *options)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert word in err
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.json"]


@pytest.mark.llama
def test_compare_reports_missing_peers(
    cllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    here = ("--peers", tmp_path, "--out", tmp_path, "--store", tmp_path / "a.jsonl")
    for row, program in (("agents", "llama-server"), ("engine-1", "llama-batched-bench")):
        code, out, err = cllm("bench", "compare", "--rows", row, *here)
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert f"{program} is neither in" in err
        assert "--build" in err


def test_compare_rewrites_page_from_rounds(cllm, tmp_path: Path) -> None:
    """The page follows from the stored rounds, and missed targets are marked."""
    store = tmp_path / "rounds.jsonl"
    runs = [
        {"row": "unrelated-8", "round": 0, "system": name, "values": {"output tokens/s": speed}}
        for name, speed in (("cLLM", 9), ("llama-server", 10))
    ]
    store.write_text("".join(json.dumps(run) + "\n" for run in runs))
    code, out, _ = cllm("bench", "compare", "--from", store, "--out", tmp_path)
    assert code == 0
    assert out.splitlines()[0] == str(tmp_path / "performance.md")
    line = "missed: unrelated-8: output tokens/s, cLLM / llama-server: 0.900, target 1.2"
    assert line in out
    assert "**missed** by 25.0%" in (tmp_path / "performance.md").read_text()
    assert store.read_text().count("\n") == 2
