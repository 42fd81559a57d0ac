"""What a backend computes for given tokens, and how fast, without an engine."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cllm.backends.base import Backend
from cllm.bench.bare_engine import make_sequences, prefill
from cllm.core.batch import Batch, Row, Trim
from cllm.core.params import SamplingParams
from cllm.core.request import Request
from cllm.core.sequence import Sequence
from cllm.engine.build import build_backend
from cllm.engine.params import EngineParams
from cllm.errors import EngineError, StartupError
from cllm.models.memory import read_resident_bytes

Logits = npt.NDArray[np.float32]


class Loaded(NamedTuple):
    """What a backend says of the model that it has loaded."""

    description: str
    system: str
    seconds: float
    tokens: list[list[int]]


class Speed(NamedTuple):
    """Tokens per second of all sequences together."""

    prefill: float
    decode: float


def start(backend: Backend, prompts: list[list[int]]) -> list[Sequence]:
    """Return a sequence without cells for each prompt."""
    count = len(prompts)
    backend.forward(Batch([], [Trim(seq_id, 0) for seq_id in range(count)]))
    requests = (Request("A", prompt, SamplingParams()) for prompt in prompts)
    return make_sequences(requests, backend.info.context_length)


def compute_logits(backend: Backend, tokens: list[int]) -> Logits:
    """Return the logits after each of ``tokens``, shape (len(tokens), vocabulary_size)."""
    [seq], rows = start(backend, [tokens]), list[Logits]()
    most = min(backend.info.max_num_samples, backend.info.max_num_batched_tokens)
    for at in range(0, len(tokens), most):
        count = min(most, len(tokens) - at)
        rows += map(np.array, backend.forward(Batch([Row(seq, at, count, count)], [])))
    return np.array(rows)


def generate(backend: Backend, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the greedy continuation of each prompt: ``count`` tokens, or fewer if it ends."""
    texts = []
    for prompt in prompts:
        [seq] = start(backend, [prompt])
        prefill(backend, seq, len(prompt) - 1)
        while len(seq.tokens) < len(prompt) + count:
            if decode(backend, [seq])[0] in backend.info.end_tokens:
                break
        texts.append(seq.tokens[len(prompt) :])
    return texts


def decode(backend: Backend, seqs: list[Sequence]) -> list[int]:
    """Compute the last token of each sequence, and append the most probable next one."""
    rows = [Row(seq, len(seq.tokens) - 1, 1, 1) for seq in seqs]
    chosen = [int(row.argmax()) for row in backend.forward(Batch(rows, []))]
    for seq, token in zip(seqs, chosen, strict=True):
        seq.append(token)
    return chosen


def measure_speed(backend: Backend, num_seqs: int, prompt_tokens: int, num_steps: int) -> Speed:
    """Compute ``num_seqs`` random prompts, and then ``num_steps`` tokens of each together."""
    chosen = random.Random(0)
    size = backend.info.vocabulary_size
    prompts = [[chosen.randrange(size) for _ in range(prompt_tokens)] for _ in range(num_seqs)]
    seqs = start(backend, prompts)
    begun = time.perf_counter()
    for seq in seqs:
        prefill(backend, seq, prompt_tokens - 1)
    prefilled = time.perf_counter()
    for _ in range(num_steps):
        decode(backend, seqs)
    ended = time.perf_counter()
    return Speed(
        num_seqs * (prompt_tokens - 1) / (prefilled - begun),
        num_seqs * num_steps / (ended - prefilled),
    )


def measure_memory(_backend: Backend) -> int:
    """Return the bytes that this process has in RAM, with mapped files."""
    return read_resident_bytes(os.getpid())


FUNCTIONS = (compute_logits, generate, measure_speed, measure_memory)


def serve(connection: Connection, params: EngineParams, texts: tuple[str, ...]) -> None:
    """Load a model and send Loaded with the tokens of ``texts``. Then call the functions, of
    FUNCTIONS, whose names and arguments arrive, and send what they return, until the connection
    closes.

    An error is sent as a text, and ends it.
    """
    functions = {function.__name__: function for function in FUNCTIONS}
    try:
        begun = time.perf_counter()
        backend = build_backend(params)
        seconds, tokenize = time.perf_counter() - begun, backend.vocabulary.tokenize
        tokens = [tokenize(text, add_special=True, parse_special=False) for text in texts]
        connection.send(Loaded(backend.info.description, backend.info.system, seconds, tokens))
        while True:
            name, arguments = connection.recv()
            connection.send(functions[name](backend, *arguments))
    except (StartupError, EngineError) as error:
        connection.send(str(error))
    except EOFError:
        pass
