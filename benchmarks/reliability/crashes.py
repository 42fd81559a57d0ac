"""Figures of crashes: what clients see when the engine dies, hangs or is slow."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.reliability.client import (
    CHAT,
    COMPLETE,
    EMBED,
    FAKE,
    NUM_SEQS,
    Answer,
    Client,
    Figure,
    connect,
    find_engine,
    serve,
)
from cllm.bench.servers import MODEL
from cllm.models.builtin.questions import held_out_questions
from cllm.models.catalog import BUILTIN

Requests = list[tuple[str, dict[str, Any]]]


def mixed_requests(count: int, seed: int = 0) -> Requests:
    """Return requests of all kinds to the built-in model, whose answers are far from ties."""
    rng = random.Random(seed)
    questions = held_out_questions(seed)
    tools = held_out_questions(seed, ["tools"])
    objects = held_out_questions(seed, ["json"])
    long = held_out_questions(seed, ["stories", "counting"])
    base = {"model": MODEL, "max_tokens": 120}

    def chat(one: Any, **more: Any) -> tuple[str, dict[str, Any]]:
        body = {**base, "messages": one.messages, "temperature": 1, "seed": rng.getrandbits(31)}
        return CHAT, {**body, **({"tools": one.tools} if one.tools else {}), **more}

    def cut(one: Any) -> tuple[str, dict[str, Any]]:
        """The answer ends in the middle of a word."""
        words = one.answer.split(" ")
        word = words[len(words) * 2 // 3]
        return chat(one, stop=[word[: max(1, len(word) // 2)] if len(word) > 3 else word])

    def complete(one: Any, **more: Any) -> tuple[str, dict[str, Any]]:
        prompt = f"{one.messages[0]['content']} salt {rng.getrandbits(30)}"
        body = {**base, "prompt": prompt, "temperature": 0, "max_tokens": 30}
        return COMPLETE, {**body, **more}

    shared = chat(next(long))
    kinds: list[Callable[[], tuple[str, dict[str, Any]]]] = [
        lambda: chat(next(long)),
        lambda: chat(next(questions), n=3),
        lambda: cut(next(long)),
        lambda: chat(next(tools)),
        lambda: chat(next(tools), stream=True),
        lambda: chat(next(objects), response_format={"type": "json_object"}),
        lambda: chat(next(long), presence_penalty=0.1, frequency_penalty=0.1, temperature=0),
        lambda: chat(next(long), dry_multiplier=0.8, temperature=0),
        lambda: chat(next(long), mirostat_mode=2, mirostat_tau=1.0),
        lambda: chat(next(questions), logprobs=True, top_logprobs=3),
        lambda: complete(next(questions), echo=True, logprobs=2),
        lambda: chat(
            next(held_out_questions(rng.getrandbits(20), ["sums"])),
            chat_template_kwargs={"enable_thinking": True},
            reasoning_budget=12,
        ),
        lambda: shared,
        lambda: (EMBED, {"model": MODEL, "input": [f"text {rng.getrandbits(30)}"] * 3}),
        lambda: chat(next(long), stream=True, stream_options={"include_usage": True}),
        lambda: chat(next(long), stream=True, logprobs=True, n=2),
    ]
    return [kind() for kind, _ in zip(itertools.cycle(kinds), range(count), strict=False)]


def make_batch_lines(count: int, seed: int) -> bytes:
    """Return the file of a batch with ``count`` requests."""
    long = held_out_questions(seed, ["stories"])
    bodies = [
        {"model": MODEL, "messages": one.messages, "temperature": 0, "max_tokens": 120}
        for one, _ in zip(long, range(count), strict=False)
    ]
    return b"".join(
        json.dumps({"custom_id": str(i), "method": "POST", "url": CHAT, "body": body}).encode()
        + b"\n"
        for i, body in enumerate(bodies)
    )


async def run_batch(client: Client, lines: bytes) -> list[Any]:
    """Return the answers of a batch, in the order of its lines."""
    import httpx2

    async with httpx2.AsyncClient(base_url=client.server.url, timeout=300) as http:
        file = await http.post(
            "/v1/files", files={"file": ("lines.jsonl", lines)}, data={"purpose": "batch"}
        )
        body = {
            "input_file_id": file.json()["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        batch = (await http.post("/v1/batches", json=body)).json()
        while batch["status"] != "completed":
            assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
            await asyncio.sleep(0.05)
            batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        text = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    answers = sorted(map(json.loads, text.splitlines()), key=lambda one: int(one["custom_id"]))
    return [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers]


async def measure_kill(rounds: int, count: int = 88, num_lines: int = 8) -> list[Figure]:
    """Kill the engine while 32 sequences run and others wait; compare with undisturbed answers."""
    same, total, longest, load = 0, 0, 0.0, 0.0
    flags = ("--max-num-seqs", NUM_SEQS, "--context", 1024, "--server.enable-faults")
    for number in range(rounds):
        requests, lines = mixed_requests(count, number), make_batch_lines(num_lines, 100 + number)
        with serve(None, *flags) as server:
            async with connect(server) as client:
                load = max(load, server.start_s)
                calm = await asyncio.gather(*(client.send(*one) for one in requests))
                calm_batch = await run_batch(client, lines)
                # every step takes longer, so that the engine dies with all of them in flight
                slow = {"kind": "slow", "seconds": 0.02, "num_steps": 100_000}
                await client.cause(slow, {"kind": "kill", "after_steps": 10 + 5 * number})
                begun = asyncio.gather(*(client.send(*one) for one in requests))
                batch = asyncio.create_task(run_batch(client, lines))
                await client.wait_until_unready()
                killed = time.perf_counter()
                await client.wait_until_ready()
                longest = max(longest, time.perf_counter() - killed)
                answers = await begun
                total += count + num_lines
                same += sum(map(are_same, calm, answers))
                same += sum(map(str.__eq__, calm_batch, await batch))
                assert await client.metric("engine_restarts_total") == 1
    return [
        Figure(
            f"kill -9 of the engine with {NUM_SEQS} sequences running and others waiting, of all "
            "kinds: answers that are the same as undisturbed",
            "all",
            f"{same} of {total}",
            same == total,
        ),
        Figure(
            "the pause that its clients see",
            f"at most {load:.1f} s (the start) + 2 s",
            f"at most {longest:.1f} s",
            longest <= load + 2,
            is_timed=True,
        ),
    ]


def are_same(calm: Answer, disturbed: Answer) -> bool:
    if calm.status != 200 or disturbed.status != 200:
        return False
    if isinstance(calm.content[0], list):  # embeddings: rounded differently in another batch
        pairs = zip(calm.content, disturbed.content, strict=True)
        return all(
            abs(a - b) < 0.01 for one, other in pairs for a, b in zip(one, other, strict=True)
        )
    same_usage = calm.usage.get("completion_tokens") == disturbed.usage.get("completion_tokens")
    return bool(calm.content == disturbed.content) and same_usage


async def measure_hang() -> list[Figure]:
    """A hung engine is replaced, and its request continues."""
    with serve(None, *FAKE, "--server.enable-faults") as server:
        async with connect(server) as client:
            await client.cause({"kind": "hang", "after_steps": 40})
            body = {"model": MODEL, "prompt": "a", "max_tokens": 200, "ignore_eos": True}
            answer = await client.send(COMPLETE, {**body, "stream": True})
            gaps = [b - a for a, b in itertools.pairwise(answer.times)]
    return [
        Figure(
            "a hung engine is replaced, and the stream continues",
            "at most 30 s",
            f"{max(gaps):.1f} s",
            max(gaps) <= 30 and answer.status == 200,
            is_timed=True,
        )
    ]


async def measure_false_alarms(seconds: float) -> list[Figure]:
    """One long prefill, whose steps take much longer than they did before, raises no alarm."""
    num_steps, per_step = 50, 96
    pause = seconds / num_steps
    flags = (*FAKE, "--server.enable-faults", "--scheduler.max-num-batched-tokens", per_step)
    with serve(None, *flags) as server:
        async with connect(server) as client:
            body = {"model": MODEL, "prompt": "a", "max_tokens": 50, "ignore_eos": True}
            await client.send(COMPLETE, body)  # the engine learns what a step costs
            slow = {"kind": "slow", "seconds": pause, "num_steps": 10 * num_steps}
            await client.cause(slow)
            begun = time.perf_counter()
            prompt = [i % 250 for i in range(num_steps * per_step)]
            answer = await client.send(COMPLETE, {**body, "prompt": prompt, "max_tokens": 1})
            took = time.perf_counter() - begun
            alarms = await client.metric("engine_restarts_total")
    return [
        Figure(
            f"false alarms in a prefill of {took / 60:.1f} minutes, with steps of {pause:.3g} s",
            "0",
            f"{alarms:.0f}",
            alarms == 0 and answer.status == 200 and took >= 0.95 * seconds,
        )
    ]


async def measure_deadline(rounds: int) -> list[Figure]:
    """Requests end at their deadline while the engine is stopped (SIGSTOP)."""
    late = []
    with serve(None, *FAKE) as server:
        async with connect(server) as client:
            engine = find_engine(server)
            for number in range(rounds):
                body = {"model": MODEL, "max_tokens": 4000, "ignore_eos": True, "deadline_ms": 1500}
                begun = time.perf_counter()
                streaming = asyncio.create_task(
                    client.send(COMPLETE, {**body, "prompt": [number + 1], "stream": True})
                )
                await asyncio.sleep(0.3)
                os.kill(engine, signal.SIGSTOP)
                try:
                    waiting = client.send(COMPLETE, {**body, "prompt": [number + 100]})
                    with contextlib.suppress(AssertionError):  # an error event, which is right
                        await streaming
                    late.append(time.perf_counter() - begun - 1.5)
                    begun_waiting = begun + 0.3
                    answer = await waiting
                    late.append(time.perf_counter() - begun_waiting - 1.5 - 1.2)
                    assert answer.status == 504, answer.body
                finally:
                    os.kill(engine, signal.SIGCONT)
                await client.wait_until_idle()
    return [
        Figure(
            "lateness of a deadline while the engine is stopped",
            "at most 0.5 s",
            f"at most {max(late):.2f} s in {len(late)}",
            max(late) <= 0.5,
            is_timed=True,
        )
    ]


async def measure_flips(total: int) -> list[Figure]:
    """Flip bits in the header of the built-in model, and load each result as cLLM does."""
    program = Path(__file__).parents[2] / "tests" / "header_flips.py"
    command = [sys.executable, str(program), str(BUILTIN), "--flips", str(total), "--seed", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await process.communicate()
    result = json.loads(output)
    ends = ", ".join(f"{count} {end}" for end, count in sorted(result["ends"].items()))
    return [
        Figure(
            f"crashes of the API process in {total:,} loads of a file with a flipped bit in its "
            "header",
            "0",
            f"{len(result['broken'])} ({ends})",
            process.returncode == 0 and not result["broken"],
        )
    ]
