"""Measure what a grammar costs: milliseconds per row, and how much it slows down other sequences.

    python benchmarks/grammar_cost.py --model models/qwen3-0.6b.gguf

Without --model, the vocabulary has 151,936 generated tokens, and the backend reads memory for
--step-ms. Rows are sampled with cold caches, as between two decodes: before each row, more memory
is read than fits into the caches. The slowdown is the step time of --sequences sequences, one of
them with a schema, divided by the step time without a schema. Both are measured in turn; the result
is the median of --rounds. Exit code 1 if a row costs more than --most-ms extra on average, or the
slowdown is more than --most-share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper

from cllm.backends.base import Backend, Logits
from cllm.backends.fake.backend import FakeBackend
from cllm.backends.fake.vocabulary import FakeVocabulary
from cllm.bench.make_model import vocabulary
from cllm.core.batch import Batch, Row
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.core.vocabulary import Pieces
from cllm.engine.build import build_backend, build_engine
from cllm.engine.commands import Abort, Add
from cllm.engine.engine import Engine
from cllm.engine.params import EngineParams
from cllm.sampling.grammar import Grammar
from cllm.sampling.pipeline import Sampler
from cllm.text.grammar import Constraint, to_lark

SIZE = 151_936
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "email": {"type": "string", "format": "email"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["friend", "colleague", "stranger"]},
        "notes": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
    },
    "required": ["name", "email", "age", "kind", "notes"],
    "additionalProperties": False,
}


class MadeVocabulary(FakeVocabulary):
    """The pieces that bench make-model generates. The last token is the end token."""

    def __init__(self) -> None:
        super().__init__()
        texts, _ = vocabulary(SIZE - 1)
        self.size = SIZE
        pieces = (text.replace("\u0120", " ").encode("latin-1", "replace") for text in texts)
        self.pieces = Pieces.of([*pieces, b""])

    def grammar_tokenizer(self, end_tokens: list[int]) -> LLTokenizer:
        table = {piece: token for token, piece in enumerate(self.pieces)}

        class Wrapped:
            eos_token_id, bos_token_id, special_token_ids, tokens = (
                end_tokens[0],
                None,
                (),
                [*self.pieces],
            )

            def __call__(self, data: bytes) -> list[int]:
                tokens, at = [], 0
                while at < len(data):
                    length = next(n for n in range(16, 0, -1) if data[at : at + n] in table)
                    tokens.append(table[data[at : at + length]])
                    at += length
                return tokens

        return LLTokenizer(TokenizerWrapper(Wrapped()))


class PacedBackend(FakeBackend):
    """Returns random logits, and reads memory for the duration of a step."""

    def __init__(self, num_seqs: int, seconds: float) -> None:
        super().__init__(max_num_seqs=num_seqs, context_length=4096)
        self.vocabulary = MadeVocabulary()
        self.info = msgspec.structs.replace(self.info, vocabulary_size=SIZE, end_tokens=[SIZE - 1])
        self._seconds = seconds
        self._weights = np.ones(50_000_000, np.float32)
        self._random = np.random.default_rng(0)

    def forward(self, batch: Batch) -> Logits:
        until = time.perf_counter() + self._seconds
        logits = self._random.normal(0, 2, (batch.num_samples, SIZE)).astype(np.float32)
        at = 0
        while time.perf_counter() < until:
            self._weights[at : at + 1_000_000].sum()
            at = (at + 1_000_000) % self._weights.shape[0]
        return logits


def row_costs(
    backend: Backend, params: SamplingParams, num_tokens: int
) -> tuple[list[float], list[float]]:
    """Return CPU milliseconds to sample a constrained row and consume its token, and to sample an
    unconstrained one.
    """
    grammar = Grammar(params.grammar, backend.vocabulary.grammar_tokenizer(backend.info.end_tokens))
    assert not grammar.error, grammar.error
    random = np.random.default_rng(1)
    caches = np.ones(50_000_000, np.float32)
    nothing = msgspec.structs.replace(params, grammar="")
    sampler, free = Sampler(), Sequence(Request("free", [1], nothing), 0, 1, 10**6)
    with_grammar: list[float] = []
    without: list[float] = []
    bound = None
    while len(with_grammar) < num_tokens:
        if bound is None or bound.matcher is None or bound.matcher.is_stopped:
            bound = Sequence(Request("bound", [1], params), 0, len(with_grammar), 10**6)
            bound.matcher = grammar.matcher()
        row = random.normal(0, 2, backend.info.vocabulary_size).astype(np.float32)
        for seq, costs in ((bound, with_grammar), (free, without)):
            logits = row.copy()[None]
            caches.sum()
            begun = time.thread_time()
            token = sampler.sample(Batch([Row(seq, 0, 1, 1)], []), logits)[0]
            if seq is bound:
                seq.append(token)
            costs.append((time.thread_time() - begun) * 1e3)
    return with_grammar, without


def step_seconds(
    engine: Engine, params: SamplingParams, num_seqs: int, num_bound: int, num_steps: int
) -> float:
    """Return the median step time in seconds while ``num_bound`` of ``num_seqs`` sequences follow
    the grammar.
    """
    free = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, ignore_eos=True)
    names = [f"{time.monotonic_ns()}-{i}" for i in range(num_seqs)]
    for i, name in enumerate(names):
        engine.handle(Add(Request(name, [1, 2, 3], params if i < num_bound else free)))
    times: list[float] = []
    while engine.has_work() and len(times) < num_steps:
        running = engine.scheduler.sequences.running
        decoding = len(running) == num_seqs and all(seq.num_lacking_tokens == 1 for seq in running)
        begun = time.perf_counter()
        outputs = engine.step()
        if decoding:
            times.append(time.perf_counter() - begun)
        for output in outputs:  # a sequence that has completed its grammar begins again
            if output.finish:
                names.append(f"{output.request_id}'")
                bound = int(output.request_id.partition("-")[2].rstrip("'")) < num_bound
                engine.handle(Add(Request(names[-1], [1, 2, 3], params if bound else free)))
    for name in names:
        engine.handle(Abort(name))
    engine.step()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--most-ms", type=float, default=0.3)
    parser.add_argument("--most-share", type=float, default=0.05)
    options = parser.parse_args()
    engine_params = EngineParams(
        path=str(options.model),
        max_num_seqs=options.sequences,
        context_length=4096,
        speculation="off",
    )
    backend: Backend
    if options.model is None:
        backend = PacedBackend(options.sequences, options.step_ms / 1e3)
    else:
        backend = build_backend(engine_params)
    grammar = to_lark(Constraint("json_schema", SCHEMA), "schema")
    params = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, grammar=grammar)

    bound, free = row_costs(backend, params, options.tokens)
    extra = statistics.fmean(bound) - statistics.fmean(free)
    print(
        f"a row: {statistics.fmean(bound):.3f} ms with the grammar, {statistics.fmean(free):.3f} "
        f"without"
    )
    quantiles = statistics.quantiles(bound, n=100)
    print(
        f"with: median {quantiles[49]:.3f}, p90 {quantiles[89]:.3f}, p99 {quantiles[98]:.3f} ms; "
        f"more: {extra:.3f} ms"
    )

    engine = build_engine(backend, engine_params)
    step_seconds(engine, params, options.sequences, 1, 20)  # compiles the grammar
    ratios = []
    for i in range(options.rounds):
        seconds = {}
        for num_bound in (0, 1) if i % 2 else (1, 0):
            seconds[num_bound] = step_seconds(
                engine, params, options.sequences, num_bound, options.steps
            )
        ratios.append(seconds[1] / seconds[0])
        print(
            f"{options.sequences} sequences: {seconds[0] * 1e3:.2f} ms a step, "
            f"{seconds[1] * 1e3:.2f} with one bound",
            flush=True,
        )
    share = statistics.median(ratios) - 1
    print(json.dumps({"row_ms": round(extra, 4), "slower": round(share, 4)}))
    sys.exit(1 if extra > options.most_ms or share > options.most_share else 0)


if __name__ == "__main__":
    main()
