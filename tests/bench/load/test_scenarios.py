"""The workloads of users: what they send, in which order, and the figures that only they have."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import repeat

from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.client import Endpoint, Outcome, measure_tokens_per_word, run_stages
from cllm.bench.load.report import Report, figures, remarks, summarize
from cllm.bench.load.scenario_figures import find_figures
from cllm.bench.load.scenarios import (
    AGENT_TURNS,
    ALONE,
    BATCH,
    CHATS,
    DOCUMENTS,
    FEWEST_TOKENS,
    LONG,
    MOST_TOKENS,
    PHASES,
    SCENARIOS,
    STREAMS,
    Sizes,
    mixed_lengths,
)
from cllm.bench.load.workload import (
    FIRST_TURNS,
    LATER_TURNS,
    Group,
    RequestSpec,
    Task,
    num_requests,
)
from cllm.bench.servers import cllm
from cllm.errors import StartupError
from cllm.observe.cpu_time import read_tree_cpu_seconds

SPEC = RequestSpec(model="fake", prompt_words=4, max_tokens=4, tokens_per_word=6)
SMALL = {"scale": 0.03, "long_tokens": 3000}


def make_stages(name: str, spec: RequestSpec = SPEC, **changes: Any) -> list[list[Group]]:
    sizes = msgspec.structs.replace(SCENARIOS[name].sizes, **SMALL | changes)
    return SCENARIOS[name].make(spec, sizes)


def sent_by(name: str, seed: int = 0) -> list[list[dict]]:
    """Return the messages of each request that opens a conversation; some of endless groups."""
    spec = msgspec.structs.replace(SPEC, seed=seed)
    groups = [group for stage in make_stages(name, spec, scale=1.0) for group in stage]
    return [
        json.loads(task.body)["messages"] for group in groups for task in islice(group.tasks, 300)
    ]


def run(url: str, name: str, spec: RequestSpec = SPEC, pid: int = 0, **changes: Any) -> Report:
    outcome = run_stages(Endpoint(url, pid=pid), make_stages(name, spec, **changes))
    return summarize(outcome, url=url, model="fake", settings={"workload": name})


@pytest.mark.parametrize("name", SCENARIOS)
def test_requests_follow_from_seed(name: str) -> None:
    """The same seed gives the same requests. No prompt occurs twice, with any seed."""
    first, again, other = sent_by(name), sent_by(name), sent_by(name, seed=1)
    assert first == again
    prompts = [json.dumps(messages) for messages in first + other]
    assert len(set(prompts)) == len(prompts)


def test_agents_share_system_prompt() -> None:
    ((group,),) = make_stages("agents", scale=1.0)
    tasks = list(group.tasks)
    messages = [json.loads(task.body)["messages"] for task in tasks]
    assert (len(tasks), num_requests(tasks)) == (8, 8 * AGENT_TURNS)
    assert len({system["content"] for system, _ in messages}) == 1
    assert len(messages[0][0]["content"].split()) == round(2000 / 6)
    assert {task.part for task in tasks} == {FIRST_TURNS}
    following = tasks[0].follow("It is so.")
    assert following.part == LATER_TURNS
    roles = [message["role"] for message in json.loads(following.body)["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


def test_each_document_is_asked_about_equally_often() -> None:
    requests = sent_by("rag")
    assert len({system["content"] for system, _ in requests}) == 1
    counts = Counter(user["content"].partition("\n\n")[0] for _, user in requests)
    assert (len(counts), set(counts.values())) == (DOCUMENTS, {4})


def test_edits_change_one_name() -> None:
    ((group,),) = make_stages("edit")
    for task in group.tasks:
        story = json.loads(task.body)["messages"][1]["content"]
        differing = {
            pair
            for pair in zip(re.findall(r"\w+", story), re.findall(r"\w+", task.answer), strict=True)
            if pair[0] != pair[1]
        }
        assert len(differing) == 1


def test_mixed_lengths_follow_power_law() -> None:
    lengths = mixed_lengths(64)
    assert (lengths[0], lengths[-1]) == (
        pytest.approx(FEWEST_TOKENS),
        pytest.approx(MOST_TOKENS),
    )
    assert lengths == sorted(lengths)
    assert sum(length < 100 for length in lengths) > 32
    assert mixed_lengths(1) == [pytest.approx(FEWEST_TOKENS)]


def test_batch_work_has_lowest_priority() -> None:
    ((batch, chats),) = make_stages("batch-beside-chat")
    for group, priority, count in ((batch, "batch", BATCH), (chats, "interactive", 16)):
        bodies = [json.loads(task.body) for task in group.tasks]
        assert ({body["priority"] for body in bodies}, len(bodies)) == ({priority}, count)


def test_tokens_per_word_are_measured(fake_server: str) -> None:
    """The fake backend's tokens are bytes, so a word has as many as letters and its space."""
    found = measure_tokens_per_word(Endpoint(fake_server), SPEC)
    assert 3 < found < 9


def test_a_refused_probe_is_named(fake_server: str) -> None:
    """As while a model loads: the answer's own reason, not that tokens are not counted."""
    spec = msgspec.structs.replace(SPEC, model="other")
    with pytest.raises(StartupError, match=r"HTTP 404: .*other"):
        measure_tokens_per_word(Endpoint(fake_server), spec)


# --- against a server ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parts", "count"),
    [
        ("agents", {FIRST_TURNS: 8, LATER_TURNS: 40}, 48),
        ("rag", {}, 48),
        ("batch-beside-chat", {"batch": BATCH, CHATS: 16}, BATCH + 16),
        ("phases", dict(zip(PHASES, (64, 65, 24, 64), strict=True)), 217),
    ],
)
def test_every_request_succeeds(
    fake_server: str, name: str, parts: dict[str, int], count: int
) -> None:
    """The report has figures for each part of the workload."""
    report = run(fake_server, name)
    assert (report.num_succeeded, report.failures) == (count, {})
    assert {part: found.num_succeeded for part, found in report.parts.items()} == parts
    for part in parts:
        assert figures(report)[f"{part}: TTFT mean ms"] > 0


def test_streams_go_on_until_long_prompt_has_ended(fake_server: str) -> None:
    report = run(fake_server, "long-beside-short")
    assert (report.num_failed, report.num_cancelled) == (0, 7)
    assert {name: part.num_succeeded for name, part in report.parts.items()} == {
        ALONE: 1,
        STREAMS: report.num_succeeded - 2,
        LONG: 1,
    }
    assert report.workload_figures["TTFT of the long prompt / alone"] > 0
    assert any("ITL p99 beside the long prompt" in line for line in remarks(report))


def test_chats_go_on_before_during_and_after_long_request(fake_server: str) -> None:
    report = run(fake_server, "long-context", scale=1.0, long_tokens=900)
    assert (report.num_failed, report.num_cancelled) == (0, 31)
    assert report.parts[LONG].num_succeeded == 1
    found = report.workload_figures
    assert found["chunks/s of the chats, during / before"] > 0
    assert found["chunks/s of the chats, after / before"] > 0
    assert 0 < found["longest pause of the long request s"] < 60


def test_failing_server_does_not_hold_up_groups(fake_server: str) -> None:
    """A group that waits for others starts when these have ended without an answer."""
    spec = msgspec.structs.replace(SPEC, model="unknown")
    report = run(fake_server, "batch-beside-chat", spec)
    assert report.failures == {"HTTP 404": BATCH + 16}
    assert figures(report)["succeeded"] == 0


@pytest.mark.llama
@pytest.mark.slow
def test_built_in_model_serves_long_context_and_edits() -> None:
    """Every request is served, edits are correct, and drafts are accepted in them."""
    with cllm(None) as server:
        spec = msgspec.structs.replace(SPEC, model="m", tokens_per_word=4.2)
        num_edits = repeat(96, 12)
        edits = run(server.url, "edit", spec, server.pid, requests=num_edits)
        assert (edits.num_succeeded, edits.failures) == (num_edits, {})
        assert edits.output_tokens_per_cpu_s > 0
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            page = response.read().decode()
        accepted = re.search(r"num_accepted_tokens_total\{.*\} ([\d.]+)", page)
        assert float(accepted[1]) > 0.2 * edits.output_tokens
        report = run(server.url, "long-context", spec, scale=1.0)
        assert (report.num_failed, report.parts[LONG].num_succeeded) == (0, 1)
        assert report.workload_figures["longest pause of the long request s"] < 10


# --- figures ------------------------------------------------------------------------------------


def answer(part: str, sent: float, times: list[float]) -> TimedAnswer:
    made = TimedAnswer(Task(b"", part=part), sent)
    made.content_times, made.ended = times, times[-1]
    return made


def test_gap_that_ends_after_first_token_counts() -> None:
    """A server that computes the whole prompt in one step sends the tokens of the streams and of
    the prompt together.
    """
    streams = [answer(STREAMS, 0.0, [1.0, 1.1, 1.2, 1.3, 9.3, 9.4])]
    streams.append(answer(STREAMS, 0.0, [0.9, 1.0, 1.1, 1.2, 1.3, 9.3]))
    others = [answer(ALONE, -9.0, [-5.0]), answer(LONG, 1.3, [9.29, 9.4])]
    found = find_figures("long-beside-short", Outcome([*others, *streams], wall=9.0, cpu=0.1))
    assert found["ITL p50 before it ms"] == pytest.approx(100)
    assert found["ITL p99 beside the long prompt ms"] == pytest.approx(8000)
    assert found["ITL p50, beside the long prompt / before"] == pytest.approx(80)
    assert found["TTFT of the long prompt / alone"] == pytest.approx(7.99 / 4)


def test_chunks_that_are_read_together_have_no_gap_to_compare_with() -> None:
    """A client that is late reads several at once: most gaps before the long prompt are 0."""
    times = [1.0, 1.0, 1.0, 1.2, 1.2, 1.2, 9.3, 9.4]
    answers = [answer(ALONE, -9.0, [-5.0]), answer(STREAMS, 0.0, times), answer(LONG, 1.3, [9.35])]
    found = find_figures("long-beside-short", Outcome(answers, wall=9.0, cpu=0.1))
    assert found["ITL p50 before it ms"] == 0
    assert found["ITL p90 beside the long prompt ms"] > 100
    assert "ITL p50, beside the long prompt / before" not in found


def test_rates_of_chats_are_those_of_their_time() -> None:
    """Two chats with 10 chunks a second each, 5 while the long request runs, from 10 s to 20 s."""
    chats = [answer(CHATS, 0.0, [i / 10 for i in range(1, 11)]) for _ in range(2)]
    for begin, end, rate in ((1, 10, 10), (10, 20, 5), (20, 25, 10)):
        times = [begin + i / rate for i in range(1, (end - begin) * rate + 1)]
        chats += [answer(CHATS, float(begin), times) for _ in range(2)]
    long = answer(LONG, 10.0, [18.0, 19.0, 20.0])
    computed_tokens = [(12.0, 100), (13.0, 200), (17.5, 300)]
    outcome = Outcome([*chats, long], wall=25.0, cpu=0.1, computed_tokens=computed_tokens)
    found = find_figures("long-context", outcome)
    assert found["chunks/s of the chats, during / before"] == pytest.approx(0.5, rel=0.02)
    assert found["chunks/s of the chats, after / before"] == pytest.approx(1.0, rel=0.02)
    assert found["longest pause of the long request s"] == 4.5


@pytest.mark.parametrize("name", ["long-beside-short", "long-context", "agents", None])
def test_missing_answers_give_no_figures(name: str | None) -> None:
    outcome = Outcome([answer(LONG, 0.0, [1.0])], wall=1.0, cpu=0.1)
    assert find_figures(name, outcome) == {}
    assert find_figures(name, Outcome([], wall=1.0, cpu=0.1)) == {}


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
def test_cpu_time_includes_ended_children() -> None:
    """A server's processes count, also those that have ended."""
    spin = "import time\nwhile time.process_time() < 0.4: pass"
    code = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); "
        "print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        # The system counts in ticks of 10 ms, so a little less than what was used.
        assert read_tree_cpu_seconds(process.pid) >= 0.3
        process.communicate(b"\n")
    assert read_tree_cpu_seconds(process.pid) == 0


def test_sizes_have_defaults() -> None:
    assert SCENARIOS["long-context"].sizes == Sizes(requests=1, clients=31, long_tokens=30_000)
