"""Shows which Python functions of an engine take its time: samples the stack of its thread, and
writes it as a picture (SVG) or for https://speedscope.app (JSON).

Time inside llama.cpp belongs to the function that calls it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from html import escape
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

from cllm.bench.stages import step_engine
from cllm.bench.work import Work, WorkSize
from cllm.engine.build import build_backend, build_engine
from cllm.engine.params import EngineParams

PERIOD = 0.001  # seconds between two samples
SECONDS = 5.0  # of sampling
SOURCES = f"{Path(__file__).parents[2]}/"
WIDTH, ROW = 1200, 18  # pixels of the picture, and of one function in it

Stack = tuple[str, ...]  # the outermost function first
Stacks = Counter[Stack]  # how often each stack was seen


def sample(work: Callable[[], object], period: float = PERIOD) -> Stacks:
    """Return the stacks of this thread during ``work``, below the function that calls it."""
    stacks: Stacks = Counter()
    watched, ended = threading.get_ident(), threading.Event()
    depth = len(list_frames(inspect.currentframe()))

    def watch() -> None:
        while not ended.wait(period):
            frame = sys._current_frames().get(watched)  # noqa: SLF001  # documented
            names = list_frames(frame)[depth:]
            if names[1:] and names[0] == name_frame(run.__code__):
                stacks[tuple(names[1:])] += 1

    def run() -> None:
        work()

    watcher = threading.Thread(target=watch, name="flame", daemon=True)
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    return stacks


def list_frames(frame: FrameType | None) -> list[str]:
    """Return the functions of a stack, the outermost one first."""
    names = []
    while frame is not None:
        names.append(name_frame(frame.f_code))
        frame = frame.f_back
    return names[::-1]


def name_frame(code: CodeType) -> str:
    return f"{code.co_qualname} ({code.co_filename.removeprefix(SOURCES)})"


def sample_engine(path: Path, size: WorkSize, seconds: float = SECONDS) -> Stacks:
    """Return the stacks of an engine in this process that does the work of ``size`` for at least
    ``seconds``, after a warm-up. Raises StartupError if the model cannot be loaded.
    """
    params = EngineParams(path=str(path), max_num_seqs=size.num_seqs, speculation="off")
    with closing(build_backend(params)) as backend:
        engine = build_engine(backend, params)
        step_engine(engine, Work(size, backend.vocabulary))

        def work() -> None:
            end, count = time.monotonic() + seconds, 0
            while time.monotonic() < end:
                count += 1
                step_engine(engine, Work(size, backend.vocabulary, count))

        return cut(sample(work), name_frame(step_engine.__code__))


def cut(stacks: Stacks, name: str) -> Stacks:
    """Return the stacks with a function, from there on: without the making of prompts."""
    found: Stacks = Counter()
    for stack, count in stacks.items():
        if name in stack:
            found[stack[stack.index(name) :]] += count
    return found


def encode_flame(stacks: Stacks, suffix: str) -> bytes:
    """Return stacks as a picture if the file's ``suffix`` is .svg, or else for speedscope."""
    return draw(stacks) if suffix == ".svg" else encode_speedscope(stacks)


def encode_speedscope(stacks: Stacks) -> bytes:
    """Return stacks in speedscope's file format."""
    frames: dict[str, int] = {}
    samples = [[frames.setdefault(name, len(frames)) for name in stack] for stack in stacks]
    profile: dict[str, Any] = {
        "type": "sampled",
        "name": "engine",
        "unit": "none",
        "startValue": 0,
        "endValue": stacks.total(),
        "samples": samples,
        "weights": [*stacks.values()],
    }
    return msgspec.json.encode(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": [{"name": name} for name in frames]},
            "profiles": [profile],
        }
    )


def draw(stacks: Stacks) -> bytes:
    """Return a flame graph as SVG: callers are above, and the width is the share of samples. Names
    appear under the pointer.
    """
    total = stacks.total() or 1
    boxes: list[str] = []
    deepest = 0
    waiting: list[tuple[Stacks, int, int]] = [(stacks, 0, 0)]
    while waiting:
        part, depth, begin = waiting.pop()
        deepest = max(deepest, depth)
        children: dict[str, Stacks] = {}
        for stack, count in part.items():
            if stack:
                children.setdefault(stack[0], Counter())[stack[1:]] += count
        for name, below in sorted(children.items()):
            count = below.total()
            boxes.append(draw_box(name, count / total, depth, begin / total))
            waiting.append((below, depth + 1, begin))
            begin += count
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{deepest * ROW}"'
    return f'{head} font-family="monospace" font-size="11">{"".join(boxes)}</svg>'.encode()


def draw_box(name: str, share: float, depth: int, begin: float) -> str:
    """Return the box of one function."""
    x, y, width = begin * WIDTH, depth * ROW, share * WIDTH
    red = 200 + sum(name.encode()) % 50
    shown = escape(name[: int(width / 7)]) if width > 20 else ""
    return (
        f"<g><title>{escape(name)}: {share:.1%}</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 1}" '
        f'fill="rgb({red},{red - 80},60)"/>'
        f'<text x="{x + 2:.1f}" y="{y + 13}">{shown}</text></g>'
    )
