"""Chat templates in processes that can be killed: correct texts, enforced limits, and no effect on
other requests.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from conftest import PATIENCE

from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.errors import BadRequest, EngineError
from cllm.text import rendering, workers
from cllm.text.rendering import Renderer
from cllm.text.templates.chat_template import MAX_LENGTH, ChatTemplate

pytestmark = pytest.mark.slow  # each starts processes

MESSAGES = [{"role": "user", "content": "gr\u00fcn <|im_start|> \U0001f600"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"x": [1, 2.5, None, True]}}}]


def vocabulary(source: str | None = None) -> FakeVocabulary:
    made = FakeVocabulary()
    if source is not None:
        made.chat_template = source
    return made


async def render(renderer: Renderer, content: str = "hi", **variables) -> str:
    return await renderer.render([{"role": "user", "content": content}], [], **variables)


def with_renderer(source, use):
    """Return what ``use(renderer)`` returns, and check that no process is left."""

    async def run():
        renderer = Renderer(partial(vocabulary, source))
        try:
            return await use(renderer)
        finally:
            await renderer.close()

    return asyncio.run(run())


def test_worker_renders_like_the_template_in_process():
    """The texts have fences, tools and variables. Errors have the template's words."""
    source = "{{ bos_token }}{{ messages[0].content }}{{ tools | tojson }}{{ enable_thinking }}"
    here = ChatTemplate(vocabulary(source)).render(MESSAGES, TOOLS, enable_thinking=True)
    there = with_renderer(
        source, lambda renderer: renderer.render(MESSAGES, TOOLS, enable_thinking=True)
    )
    assert there == here
    with pytest.raises(BadRequest, match="no such roles") as refused:
        with_renderer("{{ raise_exception('no such roles') }}", render)
    assert refused.value.param == "messages"


def test_template_with_a_syntax_error_refuses_every_chat(capfd):
    """The operator is told when the process starts."""

    async def use(renderer):
        await renderer.start()
        reported = capfd.readouterr().err
        for _ in range(2):
            with pytest.raises(BadRequest, match="syntax error") as refused:
                await render(renderer)
            assert refused.value.code == "no_chat_template"
        return reported

    assert "the model's chat template has a syntax error" in with_renderer("{% if %}", use)


def test_few_processes_render_many_texts():
    """Texts are rendered at the same time, and each one goes to its caller."""

    async def use(renderer):
        texts = await asyncio.gather(*(render(renderer, f"<{i}>") for i in range(40)))
        return texts, len(renderer._idle)

    texts, num_processes = with_renderer("{{ messages[0].content }}", use)
    assert texts == [f"<{i}>" for i in range(40)]
    assert 1 <= num_processes <= rendering.MAX_PROCESSES


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = [
    "{{ '%999999999d' % 1 }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.center(10 ** 10) }}",
    (
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% "
        "endfor %}{{ ns.x }}"
    ),
    "{% for i in range(99999) %}{{ '%99999d' % 1 }}{% endfor %}",
    "{% macro m(n) %}{% for i in range(n) %}{{ m(n - 1) }}{% endfor %}{% endmacro %}{{ m(15) }}",
    ENDLESS,
    "{{ 9 ** (9 ** 9) }}",
    "{{ 'a' | center(10 ** 10) }}",
]


@pytest.mark.skipif(sys.platform == "win32", reason="the clock of the parent is slower")
@pytest.mark.parametrize("source", BOMBS)
def test_template_bomb_fails_only_its_request(source):
    """The thread of the event loop computes almost nothing meanwhile, and the next request is
    served.
    """
    guarded = "{% if messages[0].content == 'bomb' %}" + source + "{% endif %}fine"

    async def use(renderer):
        ChatTemplate(vocabulary(guarded))  # which computes nothing yet
        longest, last = 0.0, time.thread_time()
        bomb = asyncio.create_task(render(renderer, "bomb"))
        while not bomb.done():
            await asyncio.sleep(0.005)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
        assert await render(renderer) == "fine"
        return bomb.exception(), longest

    error, longest = with_renderer(guarded, use)
    assert isinstance(error, BadRequest)
    assert error.param == "messages"
    assert longest < 0.2


def test_rendered_text_has_a_length_limit(monkeypatch):
    """In the worker and in process."""
    with pytest.raises(BadRequest, match=str(MAX_LENGTH)):
        ChatTemplate(vocabulary("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}")).render(
            [], []
        )


def test_unresponsive_process_is_killed_where_cpu_time_cannot_be_limited(monkeypatch):
    """The parent then uses a clock, because such a process looks like one that failed."""
    monkeypatch.setattr(rendering, "CPU_LIMIT", 10_000.0)
    monkeypatch.setattr(workers, "STALL_LIMIT", 0.7)
    monkeypatch.setattr(workers, "read_cpu_seconds", lambda pid: 0.0)
    monkeypatch.setattr(workers, "KILLED", ())
    with pytest.raises(BadRequest, match="seconds") as refused:
        with_renderer(ENDLESS, render)
    assert refused.value.code == "template_limit"


def test_deeply_nested_messages_are_rejected():
    """Either JSON or the template fails on them."""

    async def use(renderer):
        for levels in (100, 330, 900, 100_000):
            deep: list = []
            for _ in range(levels):
                deep = [deep]
            try:
                await renderer.render([{"role": "user", "content": deep}], [])
            except BadRequest as error:
                assert error.param == "messages"
                assert error.code is None, "no process was lost"
        assert await render(renderer) == "hi"

    with_renderer("{{ messages[0].content }}", use)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_text_is_rendered_after_its_process_was_killed_or_stopped(monkeypatch, how):
    """The client does not get the error that its messages take too long."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 2.0)

    async def use(renderer):
        assert await render(renderer) == "x"
        os.kill(renderer._idle[0].pid, how)
        return await render(renderer)

    assert with_renderer("x", use) == "x"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_stopped_processes_are_an_engine_error(monkeypatch):
    """No CPU time was used, so the answer is 503 and not 400."""
    monkeypatch.setattr(workers, "STALL_LIMIT", 0.5)
    monkeypatch.setattr(workers, "read_cpu_seconds", lambda pid: 0.0)
    monkeypatch.setattr(rendering, "CPU_LIMIT", 10_000.0)
    with pytest.raises(EngineError, match="does not answer"):
        with_renderer(ENDLESS, render)


def test_cancelled_rendering_frees_its_process_and_place():

    async def use(renderer):
        source_takes_long = [asyncio.create_task(render(renderer, "bomb")) for _ in range(5)]
        await asyncio.sleep(0.5)
        for task in source_takes_long:
            task.cancel()
        await asyncio.gather(*source_takes_long, return_exceptions=True)
        await asyncio.gather(*renderer._ending)
        assert not renderer._idle
        return await render(renderer)

    assert (
        with_renderer("{% if messages[0].content == 'bomb' %}" + ENDLESS + "{% endif %}x", use)
        == "x"
    )


def test_process_imports_no_large_module():
    """Every server runs one of them."""
    code = "import sys, cllm.text.worker, cllm.text.templates.chat_template; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    roots = {name.split(".")[0] for name in done.stdout.split()}
    assert roots & {"jinja2"}
    assert not roots & {"asyncio", "numpy", "pydantic", "pydantic_core", "msgspec", "logging"}
