"""Worker processes that can be killed: their answers, their limits, and the effect of their ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import worker_tasks
from conftest import PATIENCE

from cllm.environment import child_environment
from cllm.errors import BadRequest, EngineError
from cllm.text import workers
from cllm.text.worker import READY, Reply, encode_frame, to_json
from cllm.text.workers import Workers

LOOPS: list[Callable[[], asyncio.AbstractEventLoop]] = [asyncio.new_event_loop]
with contextlib.suppress(ImportError):
    import uvloop

    LOOPS.append(uvloop.new_event_loop)

pytestmark = pytest.mark.slow  # each starts processes

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")
Use = Callable[[Workers], Awaitable]


@pytest.fixture(params=LOOPS, ids=lambda make: make.__module__.split(".")[0])
def run(request, monkeypatch, caplog) -> Iterator[Callable]:
    """Return ``run(use, ...)``, which returns what ``use(workers)`` returns.

    Afterwards no process may be left, and no other module may have logged anything.
    """
    path = [str(Path(worker_tasks.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    launched: list[int] = []

    async def launch(*command, **options):
        process = await launch_one(*command, **options)
        launched.append(process.pid)
        return process

    launch_one = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", launch)

    def run(use: Use, prepare="prepare", *, num=2, cpu_limit=0.3):
        async def main():
            made = Workers(f"worker_tasks:{prepare}", lambda: b'"begin"', num, cpu_limit)
            try:
                return await use(made)
            finally:
                await made.close()

        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(main())

    yield run
    assert [pid for pid in launched if exists(pid)] == []
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def exists(pid: int) -> bool:
    """Return True also for a process that has ended but has not been waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def ask(made: Workers, *question) -> str | None:
    reply = await made.ask(to_json(question))
    return None if reply is None else reply.get()


async def pid_of(made: Workers) -> int:
    return int(await ask(made, "pid"))


def is_gone(pid: int) -> bool:
    return not exists(pid)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110  # nobody would set an event
            await asyncio.sleep(0.01)


TEXTS = ["", "gr\u00fcn \U0001f600", "\ud83d", "x" * 5_000_000]


@pytest.mark.parametrize("text", TEXTS, ids=["none", "some", "half a character", "much"])
def test_worker_answers_with_a_text(run, text):
    assert run(lambda made: ask(made, "echo", text)) == text


def test_few_processes_answer_many_questions(run):
    """Questions are answered at the same time, and each answer goes to its caller."""

    async def use(made):
        texts = [f"<{i}>" for i in range(40)]
        assert await asyncio.gather(*(ask(made, "echo", text) for text in texts)) == texts
        return len(
            {await pid_of(made) for _ in range(10)} | {process.pid for process in made._idle}
        )

    assert 1 <= run(use) <= 2


def test_bad_request_of_a_worker_keeps_its_process(run):
    """The caller gets it unchanged."""

    async def use(made):
        before = await pid_of(made)
        with pytest.raises(BadRequest, match="not so") as refused:
            await ask(made, "refuse", "not so")
        assert (refused.value.param, refused.value.code) == ("field", "reason")
        assert await pid_of(made) == before

    run(use)


def test_unexpected_exception_in_a_worker_is_an_engine_error(run, capfd):
    async def use(made):
        before = await pid_of(made)
        with pytest.raises(EngineError, match="KeyError"):
            await ask(made, "crash")
        assert await pid_of(made) == before

    run(use)
    assert "a mistake of ours" in capfd.readouterr().err, "the log has the traceback"


@posix
@pytest.mark.parametrize("what", ["spin", "eat"])
def test_question_over_its_limits_ends_only_its_process(run, monkeypatch, what):
    """The next question, which waits for the process, is answered."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 600.0)

    async def use(made):
        before = await pid_of(made)
        answers = await asyncio.gather(ask(made, what), ask(made, "echo", "next"))
        assert answers == [None, "next"]
        assert await pid_of(made) != before

    run(use, num=1)


@posix
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_question_is_retried_if_its_process_was_killed_or_stopped(run, monkeypatch, tmp_path, how):
    """The question did not cause that, so a new process gets it."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 2.0 if how == signal.SIGSTOP else 600.0)

    async def use(made):
        pid, path = await pid_of(made), tmp_path / "asked"
        asked = asyncio.create_task(ask(made, "sleep_the_first_time", str(path)))
        await until(path.exists)
        os.kill(pid, how)
        assert await asked == "answered"
        assert await pid_of(made) != pid

    run(use, num=1)


@posix
def test_process_that_was_stopped_while_idle_is_replaced(run, monkeypatch):
    monkeypatch.setattr(workers, "STALL_LIMIT", 2.0)

    async def use(made):
        os.kill(stopped := await pid_of(made), signal.SIGSTOP)
        assert await ask(made, "echo", "x") == "x"
        assert await pid_of(made) != stopped

    run(use, num=1)


@posix
@pytest.mark.parametrize("question", [["die"], ["sleep", 600]])
def test_question_that_two_processes_do_not_answer_is_an_engine_error(run, monkeypatch, question):
    """Neither process used too much CPU time."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 0.5)

    async def use(made):
        with pytest.raises(EngineError, match="does not answer"):
            await ask(made, *question)
        monkeypatch.setattr(workers, "STALL_LIMIT", 600.0)
        return await ask(made, "echo", "next")

    assert run(use, num=1) == "next"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU time is read from /proc")
def test_computing_process_does_not_count_as_stopped(run, monkeypatch):
    """It may compute for longer than it may be unresponsive."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 0.5)
    assert run(lambda made: ask(made, "compute", 1.5), cpu_limit=20.0) == "computed"


def test_start_does_not_count_towards_the_cpu_limit(run):
    """A question may use less CPU time than the start."""
    assert run(lambda made: ask(made, "echo", "x"), "prepare_slowly", cpu_limit=0.3) == "x"


@posix
def test_start_has_a_limit_of_its_own(run):
    """A process that computes forever before it is ready is ended."""
    assert 10 < float(run(lambda made: ask(made, "say_limit"), "note_limit")) < 61


@pytest.mark.parametrize("prepare", ["fail", "hang"])
def test_start_failure_is_an_engine_error(run, monkeypatch, prepare):
    """The next question tries again."""
    monkeypatch.setattr(workers, "START_LIMIT", 0.5)

    async def use(made):
        for _ in range(2):
            with pytest.raises(EngineError, match="does not start"):
                await ask(made, "echo", "x")
        await made.start()
        assert not made._idle

    run(use, prepare, num=1)


def test_failed_fork_is_an_engine_error(run, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def use(made):
        with pytest.raises(EngineError, match="does not start"):
            await ask(made, "echo", "x")

    run(use)


def test_start_launches_one_process_in_advance(run):
    """A second call of start and a question in the meantime use the same process."""

    async def use(made):
        _, pid = await asyncio.gather(made.start(), pid_of(made))
        await made.start()
        (process,) = made._idle
        assert pid == await pid_of(made) == process.pid

    run(use)


@posix
def test_dead_idle_process_is_replaced(run):
    """The next caller does not notice."""

    async def use(made):
        for _ in range(3):
            os.kill(dead := await pid_of(made), signal.SIGKILL)
            await made._idle[0].wait()
            assert await pid_of(made) != dead

    run(use, num=1)


def test_cancelled_question_ends_its_process(run):
    """Its answer does not go to the next question, and its place is free."""

    async def use(made):
        for seconds in (0.0, 0.001, 0.1):
            pid = await pid_of(made)
            asked = asyncio.create_task(
                ask(made, "echo", "his") if seconds == 0.0 else ask(made, "sleep", 600)
            )
            await asyncio.sleep(seconds)
            asked.cancel()
            assert await ask(made, "echo", "mine") == "mine"
            assert asked.cancelled()
            await until(partial(is_gone, pid))

    run(use, num=1)


@pytest.mark.parametrize("prepare", ["prepare", "hang"])
def test_cancelled_start_leaves_no_process(run, prepare):
    async def use(made):
        asked = [asyncio.create_task(ask(made, "sleep", 600)) for _ in range(5)]
        for task in asked:
            await asyncio.sleep(0.1)
            task.cancel()
        await asyncio.wait(asked)
        await until(lambda: not made._timeouts and not made._ending)
        assert not made._free.locked()

    run(use, prepare)


@pytest.mark.parametrize("seconds", [None, 0.0, 0.002, 0.02, 0.3])
def test_close_fails_running_waiting_and_later_questions(run, seconds):
    """The process may be at any point of its start."""

    async def use(made):
        if seconds is None:
            await made.start()
        asked = [asyncio.create_task(ask(made, "sleep", 600)) for _ in range(5)]
        await asyncio.sleep(seconds or 0.0)
        async with asyncio.timeout(PATIENCE):
            await made.close()
            await made.start()
            answers = await asyncio.gather(
                *asked, ask(made, "echo", "later"), return_exceptions=True
            )
        assert [str(answer) for answer in answers] == ["The server is shutting down."] * 6
        assert {type(answer) for answer in answers} == {EngineError}

    run(use)


def test_output_of_libraries_is_not_an_answer(run):
    async def use(made):
        assert await ask(made, "say", "printed") == "said"
        return await ask(made, "echo", "x")

    assert run(use, "chat") == "x"


@posix
def test_worker_inherits_no_secrets_and_no_modules(run, monkeypatch):
    """It has a session of its own, and does not import from the current folder."""
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def use(made):
        return int(await pid_of(made)), (await ask(made, "surroundings")).split()

    pid, (session, *names) = run(use)
    assert int(session) == pid
    assert "PYTHONPATH" in names
    assert {*names} <= {*child_environment(), "LC_CTYPE"}, "python itself sets LC_CTYPE"
    assert "HF_TOKEN" not in names


def test_worker_ends_with_its_parent():
    command = [
        sys.executable,
        "-P",
        "-m",
        "cllm.text.worker",
        "cllm.text.templates.chat_template",
        "prepare",
        "1",
    ]
    texts = {"chat_template": "x", "tool_template": None, "special_texts": {}}
    begin = encode_frame(to_json({**texts, "control_tokens": []}))
    done = subprocess.run(command, input=begin, capture_output=True, check=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr) == (encode_frame(READY), b"")


def test_reply_has_a_text_or_an_error():
    assert Reply("").get() == ""
    with pytest.raises(BadRequest, match="why"):
        Reply("", "why").get()
