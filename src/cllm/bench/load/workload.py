"""The requests of the load client.

They are made before the clock starts, and the same seed gives the same ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from statistics import NormalDist
from typing import Any, Literal

import msgspec

from cllm.bench.load.dialects import DIALECTS, Api, Messages
from cllm.errors import StartupError
from cllm.models.builtin.questions import KINDS, held_out_questions

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
LONGEST_WORD = 4  # syllables

# Tool calls arrive as structured data and not as text, and each dialect has its own form.
QUESTION_KINDS = [kind for kind in KINDS if kind != "tools"]

SPREAD = 0.8  # sigma of the lognormal lengths of a chat
LONGEST = 16  # largest multiple of the median, so that one request does not decide the result
LONG_EVERY, LONG_TIMES = 5, 25  # in long-prefill, every fifth prompt is 25 times as long
CANCELLED_EVERY = 2  # in cancel-storm, every second client disconnects
TURNS = 4
FIRST_TURNS, LATER_TURNS = "first turns", "later turns"
SHARED = 0.75  # share of a prompt that is common in shared-prefix
# shape of the gamma distribution of the gaps in bursty arrivals; 1 would be Poisson
BURSTINESS = 0.25

Arrivals = Literal["poisson", "bursty", "even"]


class Task(msgspec.Struct, frozen=True):
    """One request: the body of a chat, and the conditions for a successful answer."""

    body: bytes
    num_tokens: int | None = None
    """The exact number of tokens in the answer. None: any number except 0."""
    answer: str | None = None
    """The exact text of the answer. None: any text."""
    cancel_after: int | None = None
    """The client disconnects after this number of chunks with text. None: never."""
    may_be_refused: bool = False
    """429 or 503 with Retry-After is a correct answer too."""
    follow: Callable[[str], Task] | None = None
    """Returns the next request of the conversation, from the text of the answer."""
    part: str = ""
    """The part of the workload that the task belongs to. The report has figures for each part."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that send tasks. Each sends its next task when its last one has ended.

    With ``arrivals``, tasks are instead sent at these times, in seconds from the start of the
    group. The group starts when its stage has received ``start_after`` chunks with text. A
    ``background`` group goes on until the other groups of its stage have ended and the stage has
    received ``tail`` further chunks; then its clients disconnect. If it is ``watched``, the client
    records how far the server has computed the longest request.
    """

    tasks: Iterable[Task]
    clients: int
    arrivals: Sequence[float] | None = None
    start_after: int = 0
    background: bool = False
    tail: int = 0
    watched: bool = False


Stage = list[Group]
"""Groups that run at the same time."""


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of a workload are like. Their prompts are random words, of which the first
    ``shared_words`` are the same in all prompts. Prompt lengths are in words, and answer lengths in
    tokens. Each answer must have ``max_tokens``, so the server must support ``ignore_eos``.

    ``spread`` is the sigma of lognormal lengths. ``tokens_per_word`` depends on the server's model.
    Each request is sent with ``options``, in addition to the options that follow from the other
    fields.
    """

    api: Api = "openai"
    model: str
    prompt_words: int
    shared_words: int = 0
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    spread: float = SPREAD
    tokens_per_word: float = 2.5
    options: dict[str, Any] = {}


def word_tasks(count: int, spec: RequestSpec) -> list[Task]:
    """Return tasks that all have the same size."""
    source = WordSource(spec)
    return [source.task(spec.prompt_words, spec.max_tokens) for _ in range(count)]


def chat_tasks(count: int, spec: RequestSpec) -> list[Task]:
    """Return tasks with lognormal lengths of prompts and answers.

    The lengths in ``spec`` are the medians. All seeds give the same lengths, in another order.
    """
    source = WordSource(spec)
    prompts, answers = (
        source.lengths(count, median) for median in (spec.prompt_words, spec.max_tokens)
    )
    return [source.task(*sizes) for sizes in zip(prompts, answers, strict=True)]


def long_prefill_tasks(count: int, spec: RequestSpec) -> list[Task]:
    """Return tasks in which every fifth prompt is very long."""
    source = WordSource(spec)
    sizes = [
        spec.prompt_words * (LONG_TIMES if i % LONG_EVERY == LONG_EVERY - 1 else 1)
        for i in range(count)
    ]
    return [source.task(size, spec.max_tokens) for size in sizes]


def cancel_tasks(count: int, spec: RequestSpec) -> list[Task]:
    """Return tasks in which every second client disconnects at a random point in the first half of
    its answer.
    """
    source = WordSource(spec)
    tasks = [source.task(spec.prompt_words, spec.max_tokens) for _ in range(count)]
    leaves = [source.random.randint(1, max(1, spec.max_tokens // 2)) for _ in tasks]
    return [
        msgspec.structs.replace(task, num_tokens=None, cancel_after=leaves[i])
        if i % CANCELLED_EVERY
        else task
        for i, task in enumerate(tasks)
    ]


def overload_tasks(count: int, spec: RequestSpec) -> list[Task]:
    """Return tasks to send all at the same time. The server may reject some of them."""
    return [msgspec.structs.replace(task, may_be_refused=True) for task in word_tasks(count, spec)]


def multi_turn_tasks(count: int, spec: RequestSpec) -> list[Task]:
    """Return conversations of a few turns, ``count`` turns in all.

    Each prompt contains all earlier messages.
    """
    source = WordSource(spec)
    return conversations(spec, count, TURNS, [], lambda: source.text(spec.prompt_words))


def conversations(
    spec: RequestSpec, count: int, num_turns: int, messages: Messages, text: Callable[[], str]
) -> list[Task]:
    """Return conversations of ``num_turns`` turns, ``count`` turns in all.

    They begin with ``messages``, and ``text`` returns the next message of a user.
    """
    talks = [[text() for _ in range(num_turns)] for _ in range(-(-count // num_turns))]
    talks[-1] = talks[-1][: (count - 1) % num_turns + 1]
    return [turn(spec, messages, texts, FIRST_TURNS) for texts in talks]


def turn(spec: RequestSpec, messages: Messages, texts: list[str], part: str) -> Task:
    """Return the next request of a conversation. ``texts`` are the user's remaining messages."""
    asked = [*messages, {"role": "user", "content": texts[0]}]

    def follow(answer: str) -> Task:
        said = {"role": "assistant", "content": answer}
        return turn(spec, [*asked, said], texts[1:], LATER_TURNS)

    task = make_task(spec, asked, spec.max_tokens, part)
    return msgspec.structs.replace(task, follow=follow) if len(texts) > 1 else task


WORKLOADS: dict[str, tuple[Callable[[int, RequestSpec], list[Task]], str]] = {
    "words": (word_tasks, "random words, all of one size"),
    "chat": (chat_tasks, "random words, with lognormal lengths around the given ones"),
    "shared-prefix": (
        word_tasks,
        "random words, of which prompts share the first three quarters, or --shared-words",
    ),
    "multi-turn": (
        multi_turn_tasks,
        f"conversations of {TURNS} turns, in which each turn sends all earlier ones",
    ),
    "long-prefill": (
        long_prefill_tasks,
        f"words, but every fifth prompt is {LONG_TIMES} times as long",
    ),
    "cancel-storm": (cancel_tasks, "words, but every second client disconnects before the end"),
    "overload": (
        overload_tasks,
        (
            "words, by default all at once: a rejection (429, 503) is correct if it has "
            "Retry-After, and all other requests must succeed"
        ),
    ),
}


def num_requests(tasks: Iterable[Task]) -> int:
    """Return the number of requests in ``tasks``, including all that follow if every answer is a
    success.
    """
    count = 0
    for task in tasks:
        following: Task | None = task
        while following is not None:
            count += 1
            following = following.follow("") if following.follow else None
    return count


def question_tasks(
    count: int, *, model: str, max_tokens: int, seed: int, api: Api = "openai", least: int = 0
) -> list[Task]:
    """Return questions that the built-in model can answer although it was not trained on them, of
    all kinds in turn. Each answer has at least ``least`` characters.
    """
    options = {"max_tokens": max_tokens, "temperature": 0}
    body = DIALECTS[api].body
    tasks = (
        Task(body(model, question.messages, options), answer=question.answer)
        for question in held_out_questions(seed, QUESTION_KINDS)
        if len(question.answer) >= least
    )
    return [*islice(tasks, count)]


def arrival_times(count: int, rate: float, kind: Arrivals, seed: int) -> list[float]:
    """Return the times to send requests, in seconds from the start, ``rate`` per second on
    average.
    """
    gaps = random.Random(seed)
    shape = {"poisson": 1.0, "bursty": BURSTINESS, "even": math.inf}[kind]
    at, times = 0.0, []
    for _ in range(count):
        times.append(at)
        at += 1 / rate if shape == math.inf else gaps.gammavariate(shape, 1 / (rate * shape))
    return times


class WordSource:
    """A source of random prompts and lengths."""

    def __init__(self, spec: RequestSpec) -> None:
        """Raises StartupError if ``shared_words`` is more than ``prompt_words``."""
        if spec.shared_words > spec.prompt_words:
            raise StartupError(
                f"--shared-words {spec.shared_words} is more than --prompt-words "
                f"{spec.prompt_words}"
            )
        self.random = random.Random(spec.seed)
        self._options = spec
        self._words = self._all_words()
        self._shared = list(islice(self._words, spec.shared_words))

    def _all_words(self) -> Iterator[str]:
        while True:
            yield "".join(self.random.choices(SYLLABLES, k=self.random.randint(1, LONGEST_WORD)))

    def lengths(self, count: int, median: int) -> list[int]:
        """Return the quantiles of a lognormal distribution in random order."""
        normal = NormalDist(math.log(median), self._options.spread)
        factors = [math.exp(normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
        self.random.shuffle(factors)
        return [max(1, round(min(length, LONGEST * median))) for length in factors]

    def text(self, num_words: int) -> str:
        return " ".join(
            [*self._shared, *islice(self._words, max(1, num_words - len(self._shared)))]
        )

    def tokens(self, count: float) -> str:
        """Return a text of about ``count`` tokens."""
        return self.text(round(count / self._options.tokens_per_word))

    def task(self, num_words: int, num_tokens: int, part: str = "") -> Task:
        return make_task(
            self._options, [{"role": "user", "content": self.text(num_words)}], num_tokens, part
        )


def make_task(spec: RequestSpec, messages: Messages, num_tokens: int, part: str = "") -> Task:
    options = {
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": spec.temperature,
        "seed": spec.seed,
        **spec.options,
    }
    body = DIALECTS[spec.api].body(spec.model, messages, options)
    return Task(body, num_tokens, part=part)
