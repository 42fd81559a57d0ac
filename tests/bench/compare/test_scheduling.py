"""The rows about scheduling: their requests, settings and figures, and what they are compared
with.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cllm.bench.compare import scheduler_jobs
from cllm.bench.compare.measure import is_served
from cllm.bench.compare.rounds import BACKEND, CLLM, ENGINE, LLAMA_SERVER, RESTARTED, StoredRun
from cllm.bench.compare.rows import COMPUTED, OUTPUT, QUEUED, RESTORED, ROWS, TTFT, UNUSUAL
from cllm.bench.compare.runs import Runner, RunResult
from cllm.bench.compare.scheduler_jobs import (
    QueueJob,
    RestoreJob,
    SharedPrefixJob,
    count_shared,
    measure_step,
)
from cllm.bench.compare.systems import OPENERS, Purpose
from cllm.bench.compare.workloads import (
    ACCOUNT_SEQS,
    EQUAL_ACCOUNTS,
    FAIRNESS,
    LONG_ANSWER,
    SLOWDOWN,
    account_figures,
)
from cllm.bench.load.answer import TimedAnswer
from cllm.bench.load.workload import RequestSpec, Stage, Task

SPEC = RequestSpec(model="m", prompt_words=1, max_tokens=16, options={"top_k": 40})


def make(name: str) -> list[Stage]:
    row = ROWS[name]
    assert row.make is not None
    return row.make(SPEC, 1.0)


def read_bodies(stages: list[Stage]) -> list[dict[str, Any]]:
    tasks = [task for stage in stages for group in stage for task in group.tasks]
    return [msgspec.json.decode(task.body) for task in tasks]


def test_requests_name_their_accounts() -> None:
    bodies = read_bodies(make("accounts"))
    users = [body["user"] for body in bodies]
    counts = {user: users.count(user) for user in users}
    assert counts == {"small": 20, "large": 200, "first": 60, "second": 60}
    assert all(body["top_k"] == 40 for body in bodies)
    assert len({body["messages"][0]["content"] for body in bodies}) == len(bodies)


def test_long_answers_are_long_and_edits_have_a_part_for_each_load() -> None:
    ((group,),) = make("small-pool")
    assert all(len(task.answer or "") >= LONG_ANSWER for task in group.tasks)
    stages = make("speculation")
    loads = [(group.clients, {task.part for task in group.tasks}) for (group,) in stages]
    assert loads == [(1, {"1 client"}), (16, {"16 clients"})]
    bodies = [repr(body) for body in read_bodies(stages)]
    assert len({*bodies}) == len(bodies)


def answer(part: str, sent: float, times: list[float]) -> TimedAnswer:
    made = TimedAnswer(Task(b"", part=part), sent)
    made.content_times, made.ended = times, times[-1]
    return made


def test_fairness_counts_while_both_accounts_wait() -> None:
    """The second account is served half as much until few of its requests wait."""
    count = ACCOUNT_SEQS + 2
    first, second = EQUAL_ACCOUNTS
    answers = [answer("alone", 0.0, [2.0]), answer("small", 0.0, [3.0])]
    answers += [answer(first, 0.0, [1.0 + i, 1.0 + i]) for i in range(count)]
    answers += [answer(second, 0.0, [1.0 + i, 9.5]) for i in range(count)]
    figures = account_figures(answers)
    assert figures[SLOWDOWN] == 1.5
    assert figures[FAIRNESS] == pytest.approx(36 / 40)  # 4 chunks and 2


def test_settings_of_row_replace_those_of_system(tmp_path: Path) -> None:
    """Each setting is shown as it is written; only the server gets the folder of its run."""
    purpose = Purpose(
        None, 16, 0, tmp_path, tmp_path, ["--a 1", "--kv.disk-cache FOLDER"], tmp_path
    )
    openers: dict[str, Any] = {**OPENERS[RESTARTED](purpose)}
    assert [*openers] == ["--a 1", "--kv.disk-cache FOLDER"]
    assert openers["--kv.disk-cache FOLDER"].args[1:] == ("--kv.disk-cache", str(tmp_path))
    assert [*OPENERS[CLLM](purpose._replace(settings=()))] == [""]
    (tmp_path / "llama-server").touch(0o755)
    assert [*OPENERS[LLAMA_SERVER](purpose._replace(settings=["-c 512"]))] == ["-c 512"]
    for row in ROWS.values():
        assert {*row.settings} <= {*row.systems}
        assert all(is_served(row, system) for system in row.settings)


def test_requests_are_sent_before_and_after_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    @contextmanager
    def opener():
        events.append("start")
        yield
        events.append("stop")

    def send(self: Runner, server: object, row: object, run: StoredRun) -> RunResult:
        events.append("send")
        return RunResult({})

    monkeypatch.setattr(Runner, "_send", send)
    runner = Runner(None, Path(), Path(), 1.0)
    for system, starts in ((CLLM, 1), (RESTARTED, 2)):
        events.clear()
        runner.measure_server(
            ROWS["restart"], StoredRun(row="restart", system=system, round=0), opener
        )
        assert events == ["start", "send", "stop"] * starts


def test_servers_and_engine_of_one_row_are_measured_apart() -> None:
    assert is_served(ROWS["restart"], CLLM)
    assert not is_served(ROWS["restart"], ENGINE)
    assert not is_served(ROWS["shared-bound"], BACKEND)
    assert not is_served(ROWS["engine-8"], CLLM)
    assert {"accounts", "queue"} <= {*UNUSUAL}


def test_shared_beginning_is_counted() -> None:
    assert count_shared([[1, 2, 3, 4], [1, 2, 4], [1, 2, 3, 5]]) == 2
    assert count_shared([[1, 2], [3, 4]]) == 0


def test_time_of_step_is_measured_with_each_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_jobs, "STEPS", 60)
    monkeypatch.setattr(scheduler_jobs, "MANY_WAITING", 100)
    monkeypatch.setattr(scheduler_jobs.gc, "disable", lambda: None)
    values = QueueJob().run()
    assert values[QUEUED] > 0
    assert measure_step(1) > 0


@pytest.mark.llama
def test_least_work_is_measured(builtin_path: Path) -> None:
    model = str(builtin_path)
    prompts = [[*range(20, 60), 100 + i, 7] for i in range(6)]
    job = SharedPrefixJob(model=model, prompts=prompts, num_seqs=4, num_tokens=3)
    values = job.run()
    assert values[COMPUTED] == 40 + 6 * 2
    assert values[OUTPUT] > 0
    assert values[TTFT] > 0
    assert 0 < RestoreJob(model=model).run()[RESTORED] < 1
