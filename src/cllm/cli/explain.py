"""``cllm explain``."""

from __future__ import annotations

from itertools import groupby
from statistics import fmean
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter, validators

from cllm.cli.remote import LOCAL, error_message, send
from cllm.cli.table import format_table
from cllm.errors import CLLMError
from cllm.scheduler.trace import MAX_STEPS, Explanation, SequenceState, Step

MAX_SHOWN = 10  # waiting sequences


def explain(
    url: Annotated[str, Parameter(help="The server's address.", env_var="CLLM_URL")] = LOCAL,
    *,
    steps: Annotated[
        int,
        Parameter(
            help="Number of recent steps to show.",
            validator=validators.Number(gte=1, lte=MAX_STEPS),
        ),
    ] = 20,
    model: Annotated[
        str | None, Parameter(help="A model of the server. [default: the server's]")
    ] = None,
    engine: Annotated[
        int,
        Parameter(help="Number of one of the model's engines.", validator=validators.Number(gte=0)),
    ] = 0,
    replica: Annotated[
        str | None,
        Parameter(help="Name of one replica behind a front of a cluster. [default: all]"),
    ] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print the server's JSON answer unchanged.")
    ] = False,
) -> None:
    """Show what a running server computes in each step, which requests wait, and why. A front of a
    cluster shows that of its replicas.
    """
    raw = fetch(url, steps, model, engine, replica)
    if as_json:
        print(raw.decode())
        return
    try:
        replicas = msgspec.json.decode(raw, type=ReplicaExplanations).replicas
        if replicas is None:
            print("\n".join(lines(msgspec.json.decode(raw, type=Explanation))))
            return
    except msgspec.MsgspecError as error:
        raise CLLMError(f"the server at {url} is not a cLLM server: {error}") from None
    texts = ("\n".join([f"Replica {name}:", *lines(one)]) for name, one in replicas.items())
    print("\n\n".join(texts))


class ReplicaExplanations(msgspec.Struct):
    """The answer of a front: the explanations of its replicas, by name."""

    replicas: dict[str, Explanation] | None = None


def fetch(
    url: str, steps: int, model: str | None = None, engine: int = 0, replica: str | None = None
) -> bytes:
    """Return the server's answer. Raises StartupError, or CLLMError if it is not a cLLM server."""
    params = {"steps": steps, "engine": engine} | ({"model": model} if model else {})
    params |= {"replica": replica} if replica else {}
    answer = send(url, "GET", "/scheduler", params=params, timeout=30)
    if answer.status_code != 200:
        raise CLLMError(f"{error_message(answer)} ({url})")
    content: bytes = answer.content
    return content


def lines(explanation: Explanation) -> list[str]:
    """Return the explanation as lines of text."""
    steps = explanation.steps
    lines = [format_steps(steps) if steps else "No step has been computed yet."]
    if steps and not explanation.running and not explanation.num_waiting:
        lines.insert(0, "The server is idle. The last steps were:")
    lines.append("")
    if explanation.row_seconds:
        rows = ", ".join(f"{n}: {s * 1e3:.1f} ms" for n, s in explanation.row_seconds.items())
        lines.append(f"Step time by decoding sequences: {rows}.")
    if explanation.token_seconds:
        lines.append(f"Each prompt token adds {explanation.token_seconds * 1e3:.2f} ms.")
    lines += [f"{explanation.cells}", f"Running: {len(explanation.running)}"]
    lines += [f"  {describe_sequence(seq)}" for seq in explanation.running]
    lines.append(f"Waiting: {explanation.num_waiting}")
    lines += [f"  {describe_sequence(seq)}" for seq in explanation.waiting[:MAX_SHOWN]]
    if explanation.num_waiting > MAX_SHOWN:
        lines.append(f"  ... and {explanation.num_waiting - MAX_SHOWN} more")
    return lines


def describe_sequence(seq: SequenceState) -> str:
    """Return what a sequence does, and why it waits or has waited, in sentences."""
    account = f"account {seq.account}, " if seq.account else ""
    who = f"{seq.name} ({account}class {seq.priority})"
    past = seq.phase_seconds
    if seq.phase == "queued":
        begin = ""
        if seq.expected_wait is not None:
            begin = f" It begins in about {seq.expected_wait:.1f} s."
        length = f" with a prompt of {seq.num_prompt_tokens} tokens"
        what = length if seq.num_prompt_tokens else ""  # one that waits for its model was not read
        return f"{who} has waited {past:.1f} s{what}, because {seq.reason}.{begin}"
    output = f"{seq.num_output_tokens} output tokens"
    if seq.phase == "parked":
        return (
            f"{who} gave up its cells {past:.1f} s ago, after {output}. It continues later, "
            f"because {seq.reason}."
        )
    if seq.phase == "prefill":
        prompt = seq.num_prompt_tokens + seq.num_output_tokens
        doing = (
            f"has computed {seq.num_computed_tokens} of {prompt} tokens of its prompt in "
            f"{past:.1f} s, {seq.num_cached_tokens} of them from the cache."
        )
    else:
        rate = seq.tokens_per_second
        doing = f"has {output} after {past:.1f} s"
        doing += "." if rate is None else f", {rate:.1f} tokens/s."
    waited = ""
    if seq.reason and seq.queued:
        waited = f" It waited {seq.queued:.1f} s before, because {seq.reason}."
    parked = f" It was parked {count(seq.num_parked, 'time')}." if seq.num_parked else ""
    return f"{who}, {seq.age:.1f} s old, {doing}{waited}{parked}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def what_is_shown(step: Step) -> tuple[Any, ...]:
    """Return the contents of a step's line in the table, without its number and its time."""
    return (
        *(step.num_rows, step.num_prefill_tokens, step.prefill_budget, step.num_accepted),
        *(step.num_guesses, step.num_operations, step.num_running, step.num_waiting, step.blocked),
    )


def format_steps(steps: list[Step]) -> str:
    """Return a table with one line for each step. Consecutive steps that differ only in their time
    share a line, with the mean time.
    """
    groups = [list(alike) for _, alike in groupby(steps, what_is_shown)]
    head = (
        *("step", "ms", "rows", "prompt tokens", "drafts accepted", "operations", "running"),
        *("waiting", "limited by"),
    )
    rows = [
        (
            step.number if len(alike) == 1 else f"{step.number}-{alike[-1].number}",
            f"{fmean(one.seconds for one in alike) * 1e3:.1f}",
            step.num_rows,
            f"{step.num_prefill_tokens} of {step.prefill_budget}",
            f"{step.num_accepted} of {step.num_guesses}",
            step.num_operations,
            step.num_running,
            step.num_waiting,
            step.blocked or "-",
        )
        for alike in groups
        for step in alike[:1]
    ]
    return format_table([head, *rows])
