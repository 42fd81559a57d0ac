"""Work to compare systems with: the same prompts as messages, as requests and as token ids."""

from __future__ import annotations

import random
import time

import msgspec

from cllm.backends.base import Vocabulary
from cllm.bench.load.dialects import DIALECTS, Api
from cllm.bench.load.workload import SYLLABLES, Task
from cllm.bench.servers import MODEL
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.segments import tokenize_segments
from cllm.text.templates.chat_template import ChatTemplate
from cllm.text.templates.fences import Fences

# servers' own defaults differ
SENT = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos")


class WorkSize(msgspec.Struct, frozen=True):
    """How much work to make.

    ``temperature`` 0 is greedy; other temperatures use top-k 40 and top-p 0.95.
    """

    num_seqs: int
    prompt_words: int
    num_tokens: int
    temperature: float
    seed: int


class Work:
    """The prompts of one size: as messages, as request bodies and as token ids."""

    def __init__(self, size: WorkSize, vocabulary: Vocabulary, number: int = 0) -> None:
        """Two works with different ``number`` have no prompt in common."""
        self.size = size
        self.number = number
        self._vocabulary = vocabulary
        self.params = SamplingParams(
            temperature=size.temperature,
            top_k=40,
            top_p=0.95,
            max_tokens=size.num_tokens,
            ignore_eos=True,
        )
        rng = random.Random(f"{size.seed} {number}")
        texts = [
            "".join(rng.choices(SYLLABLES, k=3)) for _ in range(size.num_seqs * size.prompt_words)
        ]
        starts = range(0, len(texts), size.prompt_words)
        prompts = [" ".join(texts[start : start + size.prompt_words]) for start in starts]
        self.talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
        template, fences = ChatTemplate(vocabulary), Fences(vocabulary)
        self.prompts = [
            tokenize_segments(vocabulary, fences.split(template.render(talk, [])))
            for talk in self.talks
        ]
        self.tasks = self.tasks_in("openai")

    def tasks_in(self, api: Api, model: str = MODEL) -> list[Task]:
        body, options = DIALECTS[api].body, {name: getattr(self.params, name) for name in SENT}
        return [Task(body(model, talk, options), self.size.num_tokens) for talk in self.talks]

    def before(self) -> Work:
        """Return the same prompts with one output token each.

        Running it computes the prompts into the cells.
        """
        return Work(msgspec.structs.replace(self.size, num_tokens=1), self._vocabulary, self.number)

    @property
    def context(self) -> int:
        """A context length that suffices for this work and for works of the same size with other
        words.
        """
        return int(1.2 * max(map(len, self.prompts))) + self.size.num_tokens + 32

    @property
    def num_tokens(self) -> int:
        return self.size.num_seqs * self.size.num_tokens

    def requests(self) -> list[Request]:
        return [
            Request(f"{time.monotonic_ns()}-{i}", prompt, self.params).with_seed()
            for i, prompt in enumerate(self.prompts)
        ]
