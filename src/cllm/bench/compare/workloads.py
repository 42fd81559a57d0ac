"""The requests of each row of ``cllm bench compare``, and the figures of the row about accounts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from statistics import fmean

from msgspec.structs import replace

from cllm.bench.distribution import jain_index
from cllm.bench.load.answer import TimedAnswer, split_parts
from cllm.bench.load.scenarios import ALONE, SCENARIOS, Sizes, Writer, edits
from cllm.bench.load.workload import (
    Group,
    RequestSpec,
    Stage,
    chat_tasks,
    question_tasks,
    word_tasks,
)

SPREAD = 0.25  # sigma of the lengths of unrelated requests
SHARERS = 8
LONG_ANSWER, LONG_ANSWERS = 120, 16  # characters, and the number of such answers
LARGE, SMALL, EQUAL = 200, 10, 60  # requests of an account
LARGE_ACCOUNT, SMALL_ACCOUNT, EQUAL_ACCOUNTS = "large", "small", ("first", "second")
ACCOUNT_SEQS = 8  # sequences that the server computes at a time, so that the others wait
# names of figures
SLOWDOWN, FAIRNESS = "latency of the small account / alone", "Jain index of two equal accounts"
EDITS = 48
EDITORS = {"1 client": 1, "16 clients": 16}  # name of the part -> clients


def unrelated(clients: int, spec: RequestSpec, scale: float) -> list[Stage]:
    spec = with_prompt(spec, 50 * scale)
    return [[Group(tasks=chat_tasks(max(8, 2 * clients), spec), clients=clients)]]


def shared_prefix(spec: RequestSpec, scale: float) -> list[Stage]:
    shared = round(1000 * scale)
    spec = replace(spec, prompt_words=shared + 20, shared_words=shared)
    return [[Group(tasks=word_tasks(24, spec), clients=SHARERS)]]


def kept_alive(spec: RequestSpec, scale: float) -> list[Stage]:
    return [[Group(tasks=word_tasks(64, with_prompt(spec, 50 * scale)), clients=8)]]


def one_prompt(tokens: float, spec: RequestSpec, scale: float) -> list[Stage]:
    return [[Group(tasks=word_tasks(1, with_prompt(spec, tokens * scale)), clients=1)]]


def long_answers(spec: RequestSpec, _: float) -> list[Stage]:
    """Return questions for the built-in model, sent all at once. Each answer is checked."""
    tasks = question_tasks(
        LONG_ANSWERS,
        model=spec.model,
        max_tokens=400,
        seed=spec.seed,
        api=spec.api,
        least=LONG_ANSWER,
    )
    return [[Group(tasks=tasks, clients=LONG_ANSWERS)]]


def edits_by_clients(spec: RequestSpec, _: float) -> list[Stage]:
    """Return texts that the built-in model repeats with a change, for one client and for many."""
    ((group,),) = edits(spec, Sizes(requests=EDITS * len(EDITORS), clients=1))
    tasks = iter(group.tasks)
    return [
        [Group(tasks=[replace(task, part=part) for task in islice(tasks, EDITS)], clients=clients)]
        for part, clients in EDITORS.items()
    ]


def accounts(spec: RequestSpec, scale: float) -> list[Stage]:
    """Return requests of a small account alone and then next to a large one, and of two accounts
    that send equally many requests.
    """
    writer = Writer(spec, Sizes(requests=0, clients=0, scale=scale))

    def send(part: str, count: int, account: str, start_after: int = 0) -> Group:
        options = spec.options | {"user": account}
        tasks = [writer.ask(writer.tokens(100), part, options=options) for _ in range(count)]
        return Group(tasks=tasks, clients=count, start_after=start_after)

    lead = ACCOUNT_SEQS * spec.max_tokens
    return [
        [send(ALONE, SMALL, SMALL_ACCOUNT)],
        [
            send(LARGE_ACCOUNT, LARGE, LARGE_ACCOUNT),
            send(SMALL_ACCOUNT, SMALL, SMALL_ACCOUNT, start_after=lead),
        ],
        [send(account, EQUAL, account) for account in EQUAL_ACCOUNTS],
    ]


def account_figures(answers: Sequence[TimedAnswer]) -> dict[str, float]:
    """Return how much longer the small account waits next to the large one than alone, and how
    equally the two equal accounts are served while both have waiting requests.
    """
    parts = split_parts(answers)
    latencies = {
        part: fmean(answer.ended - answer.sent for answer in parts[part])
        for part in (ALONE, SMALL_ACCOUNT)
    }
    equal = [parts[account] for account in EQUAL_ACCOUNTS]
    until = min(sorted(answer.first for answer in side)[-ACCOUNT_SEQS - 1] for side in equal)
    served = [sum(at <= until for one in side for at in one.content_times) for side in equal]
    return {
        SLOWDOWN: latencies[SMALL_ACCOUNT] / latencies[ALONE],
        FAIRNESS: jain_index(served) or 0.0,
    }


def scenario(name: str, spec: RequestSpec, scale: float) -> list[Stage]:
    sizes = replace(SCENARIOS[name].sizes, scale=scale)
    return SCENARIOS[name].make(spec, sizes)


def with_prompt(spec: RequestSpec, tokens: float) -> RequestSpec:
    return replace(spec, prompt_words=max(1, round(tokens / spec.tokens_per_word)), spread=SPREAD)
