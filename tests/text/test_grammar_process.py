"""The process that checks grammars: hostile ones, restarts, and the cache of results."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import worker_tasks
from conftest import PATIENCE

from cllm.errors import BadRequest, EngineError
from cllm.text import grammar_process, workers
from cllm.text.grammar import CheckedGrammar, Constraint, Special
from cllm.text.grammar_process import GrammarProcess
from cllm.text.tools.call_grammar import BoundMessage, CallableTool
from cllm.text.tools.model_family import load_families

pytestmark = pytest.mark.slow  # each starts processes

NUMBER = Constraint("json_schema", {"type": "integer"})


class Checks:
    """Uses one process in a loop of its own; ``seconds`` of each check, None where it was known."""

    def __init__(self) -> None:
        self.seconds: list[float | None] = []

    def run(self, use: Callable[[GrammarProcess], Awaitable]):
        async def main():
            process = GrammarProcess(
                lambda: Special(300, {257: "<|im_start|>"}), self.seconds.append
            )
            try:
                return await use(process)
            finally:
                await process.close()

        return asyncio.run(main())


async def refusal(process: GrammarProcess, constraint: Constraint) -> str:
    with pytest.raises(BadRequest) as caught:
        await process.check(constraint, "field")
    assert caught.value.param == "field"
    return str(caught.value)


def test_cached_checks_do_not_show_what_other_tenants_use():
    checks = Checks()

    async def use(process):
        for salt in ("a\0", "b\0", "a\0", "b\0x", "a\0"):
            await process.check(NUMBER, "field", salt)
            await process.bind(loose({"f": CallableTool(INTEGER, True)}), salt)

    checks.run(use)
    assert [seconds is None for seconds in checks.seconds[::2]] == [False, False, True, False, True]
    assert checks.seconds[1::2].count(None) == 2


def test_checked_grammars_are_cached():
    checks = Checks()

    async def use(process):
        first = await process.check(NUMBER, "field")
        assert first.grammar.startswith("start: ")
        assert await process.check(NUMBER, "field") == first
        for _ in range(2):
            assert "'not'" in await refusal(
                process, Constraint("json_schema", {"not": {"const": 1}})
            )

    checks.run(use)
    assert [seconds is None for seconds in checks.seconds] == [False, True, False, True]


def deep(levels: int) -> dict:
    schema: dict = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


HOSTILE = {
    "deep": Constraint("json_schema", deep(5000)),
    "too deep for llguidance": Constraint("json_schema", deep(100)),
    "long": Constraint("json_schema", {"const": "x" * 500_000}),
    "many characters": Constraint(
        "json_schema", {"type": "string", "minLength": 10**9, "maxLength": 10**9}
    ),
    "many items": Constraint("json_schema", {"type": "array", "minItems": 10**6}),
    "a chain of references": Constraint(
        "json_schema",
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(9000)},
        },
    ),
    "a product of unions": Constraint(
        "json_schema",
        {
            "allOf": [
                {"anyOf": [{"minimum": i}, {"maxLength": i}, {"minItems": i}]} for i in range(40)
            ]
        },
    ),
    "a lone surrogate": Constraint("regex", "\ud800"),
    "nested parentheses": Constraint("grammar", "root ::= " + "(" * 40_000 + '"a"' + ")" * 40_000),
    "a chain of rules": Constraint(
        "grammar",
        "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(6000)), 'r6000 ::= "a"']),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_grammar_after_a_hostile_one_is_checked(name):
    """It waits until the limits end the hostile one."""

    async def use(process):
        await process.check(NUMBER, "warm")
        hostile = asyncio.create_task(refusal(process, HOSTILE[name]))
        await asyncio.sleep(0)
        await process.check(Constraint("regex", "a+"), "other")
        assert len(await hostile) < 700

    Checks().run(use)


LARGE = {"enum": [f"{i:050}" for i in range(9000)]}
CALLABLE: dict[str, Any] = {
    "enforced": ({"f": {"properties": {"x": {"type": "integer"}}}}, '"x', ()),
    "without a keyword": (
        {"f": {"properties": {"x": {"uniqueItems": True}}}},
        '"x',
        ("uniqueItems",),
    ),
    "without what cannot be compiled": (
        {"f": {"properties": {"x": {"pattern": "("}}}},
        '"x',
        ("pattern",),
    ),
    "the others": ({"f": {"oneOf": []}, "g": {"required": ["x"]}}, '"x', ("parameters",)),
    "names, as schemas are too large": (
        {"f": {"properties": {"x": LARGE}}, "g": {}},
        '"f',
        ("parameters",),
    ),
    "nothing, as names are too large": ({f"{i:064}": {} for i in range(9000)}, "", ("tools",)),
}


@pytest.mark.parametrize("case", CALLABLE)
def test_optional_calls_are_constrained_as_far_as_possible(case):
    """Nothing is rejected, unless a function is strict."""
    schemas, sign, unenforced = CALLABLE[case]

    def message(*, strict: bool) -> BoundMessage:
        tools = {name: CallableTool(schema, strict) for name, schema in schemas.items()}
        return BoundMessage(load_families()["hermes"], tools, calls=True, is_loose=True)

    async def use(process):
        bound = await process.bind(message(strict=False))
        assert sign in bound.grammar
        assert bound.unenforced == unenforced
        if unenforced:
            with pytest.raises(BadRequest) as caught:
                await process.bind(message(strict=True))
            assert caught.value.param == "tools"

    Checks().run(use)


INTEGER = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def loose(tools: dict[str, CallableTool], family: str = "hermes") -> BoundMessage:
    return BoundMessage(load_families()[family], tools, calls=True, is_loose=True)


def test_strict_function_is_enforced_next_to_oversized_ones():
    """Only the names of the others are constrained. A strict function that is too large is
    rejected.
    """

    async def use(process):
        large = {"properties": {"y": LARGE}}
        bound = await process.bind(
            loose({"f": CallableTool(INTEGER, True), "g": CallableTool(large)})
        )
        assert '"x' in bound.grammar
        assert bound.unenforced == ("parameters",)
        with pytest.raises(BadRequest):
            await process.bind(loose({"f": CallableTool(INTEGER), "g": CallableTool(large, True)}))
        assert await process.bind(
            loose({"f": CallableTool(large, True)}, "qwen3_coder")
        ) != CheckedGrammar("", ("tools",))

    Checks().run(use)


def test_optional_calls_do_not_wait_long_for_other_grammars(monkeypatch):
    """They are left unconstrained instead. With a strict function they wait, because it must be
    enforced.
    """
    monkeypatch.setattr(grammar_process, "PATIENCE", 0.01)

    async def use(process):
        async with process._turn:
            strict = asyncio.create_task(process.bind(loose({"f": CallableTool(INTEGER, True)})))
            assert await process.bind(loose({"f": CallableTool(INTEGER)})) == CheckedGrammar(
                "", ("tools",)
            )
            assert not strict.done()
        assert (await strict).grammar
        assert (await process.bind(loose({"f": CallableTool(INTEGER)}))).grammar

    Checks().run(use)


def test_rejected_large_grammars_do_not_evict_other_results(monkeypatch):
    monkeypatch.setattr(grammar_process, "MAX_KNOWN_SIZE", 10_000)
    checks = Checks()

    async def use(process):
        await process.check(NUMBER, "field")
        for i in range(9):
            await refusal(process, Constraint("json_schema", {"not": {"const": f"{i}" * 5000}}))
        await process.check(NUMBER, "field")

    checks.run(use)
    assert checks.seconds[-1] is None


def test_unexpected_errors_are_not_cached(monkeypatch):
    """A later request may succeed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(worker_tasks.__file__).parent))
    monkeypatch.setattr(grammar_process, "PREPARE", "worker_tasks:break_down")

    async def use(process):
        with pytest.raises(EngineError, match="KeyError"):
            await process.check(NUMBER, "field")
        assert await process.bind(loose({"f": CallableTool(INTEGER)})) == CheckedGrammar(
            "", ("tools",)
        )
        assert not process._known

    Checks().run(use)


def test_expensive_looking_regexes_are_accepted():
    """Patterns that make other engines backtrack, or that have large counts."""

    async def use(process):
        for pattern in ("^(a+)+$", "(a{1,100}){1,100}", "(a|a)*b", "(.*a.{30})"):
            assert await process.check(Constraint("regex", pattern), "field")

    Checks().run(use)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_slow_grammar_is_rejected_alone(monkeypatch):
    """Grammars that wait behind it are checked."""
    monkeypatch.setattr(grammar_process, "CPU_LIMIT", 0.02)
    many = Constraint("json_schema", {"enum": [f"{i:035}" for i in range(9000)]})

    async def use(process):
        assert "too complex" in await refusal(process, many)
        assert await process.check(Constraint("regex", "a"), "field") == ("start: /a/", ())

    Checks().run(use)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_stopped_process_is_replaced(monkeypatch):
    """No grammar is rejected, and no wrong result is cached."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 1.0)

    async def use(process):
        await process.check(NUMBER, "field")
        (idle,) = process._idle
        idle.send_signal(signal.SIGSTOP)
        assert await process.check(Constraint("regex", "a"), "field") == ("start: /a/", ())
        assert [kept.pid for kept in process._idle] != [idle.pid]

    Checks().run(use)


def test_dead_process_is_restarted():
    """No grammar is rejected."""

    async def use(process):
        await process.check(NUMBER, "field")
        (idle,) = process._idle
        idle.kill()
        await idle.wait()
        assert await process.check(Constraint("regex", "a"), "field") == ("start: /a/", ())

    Checks().run(use)


def test_start_failure_is_an_engine_error(monkeypatch):
    """No grammar is rejected, and nothing is cached."""

    async def use(process):
        with monkeypatch.context() as patch:
            patch.setattr(workers, "START_LIMIT", 0.0)
            with pytest.raises(EngineError, match="does not start"):
                await process.check(NUMBER, "field")
        assert (await process.check(NUMBER, "field")).grammar.startswith("start: ")

    Checks().run(use)


def test_what_a_process_imports():
    code = "import sys, cllm.text.worker, cllm.text.grammar; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    roots = {name.split(".")[0] for name in done.stdout.split()}
    assert not roots & {
        "asyncio",
        "numpy",
        "pydantic",
        "pydantic_core",
        "msgspec",
        "jinja2",
        "logging",
    }


def test_cancelled_question_does_not_answer_the_next_one():

    async def use(process):
        await process.check(NUMBER, "field")
        gone = asyncio.create_task(process.check(Constraint("regex", "b"), "field"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.cancel()
        assert await process.check(Constraint("regex", "a"), "field") == ("start: /a/", ())
        assert gone.cancelled()

    Checks().run(use)


def test_concurrent_equal_questions_are_checked_once():
    checks = Checks()

    async def use(process):
        assert (
            len({*await asyncio.gather(*(process.check(NUMBER, "field") for _ in range(9)))}) == 1
        )

    checks.run(use)
    assert len(checks.seconds) == 1


def test_cache_is_bounded_by_number_and_size(monkeypatch):
    """The least recently used results are evicted."""
    monkeypatch.setattr(grammar_process, "MAX_KNOWN", 10)
    monkeypatch.setattr(grammar_process, "MAX_KNOWN_SIZE", 10_000)

    async def use(process):
        for i in range(30):
            await process.check(Constraint("regex", f"a{i}"), "field")
        assert len(process._known) == 10
        for i in range(9):
            await process.check(Constraint("regex", f"{i}" * 2000), "field")
        assert len(process._known) < 6
        assert process._known_size == sum(
            grammar_process.entry_size(question, verdict)
            for question, verdict in process._known.items()
        )

    Checks().run(use)


def test_too_many_waiting_grammars_are_an_error(monkeypatch):
    monkeypatch.setattr(grammar_process, "MAX_WAITING", 3)

    async def use(process):
        asked = [process.check(Constraint("regex", f"a{i}"), "field") for i in range(5)]
        return await asyncio.gather(*asked, return_exceptions=True)

    results = Checks().run(use)
    assert [isinstance(result, EngineError) for result in results] == [False] * 3 + [True] * 2
