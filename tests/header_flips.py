"""Flip bits in the header of a model and load each result as cLLM does, in processes that may
crash.

    python tests/header_flips.py MODEL --flips 1000 --seed 0   (with the sources on PYTHONPATH)

Prints one JSON object: how often each kind of end occurred, and the flips that broke a promise. An
engine process may crash on the file, but the vocabulary of a file that it has read must not crash
the API process. What ``LLM`` accepts must not crash the process of its caller.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from cllm.backends.llama_cpp.vocabulary import LlamaVocabulary
from cllm.config.sources import load_settings
from cllm.engine.build import build_backend, fit_memory
from cllm.engine.settings import make_engine_params
from cllm.errors import StartupError
from cllm.models.gguf import read_header

SMALL = {
    "model.max_context_length": 64,
    "scheduler.max_num_seqs": 2,
    "backend.llama_cpp.n_threads": 1,
}
HANGS = 120  # seconds
SOUND, REFUSED, VOCABULARY_READ = 0, 2, b"."


def forked(work: Callable[[int], None]) -> tuple[int, bytes]:
    """How a process ends that does ``work``, negative for a signal; and what it has written to the
    pipe it got.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(HANGS)
        code = 3
        try:
            work(writing)
            code = SOUND
        except StartupError:
            code = REFUSED
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said


def load(path: Path, *, check_tokens: bool) -> Callable[[int], None]:
    """Do what the engine does until it is ready."""

    def work(pipe: int) -> None:
        settings = load_settings(None, {}, SMALL).settings
        params = fit_memory(make_engine_params(settings, path, check_tokens=check_tokens))
        build_backend(params, lambda share: os.write(pipe, VOCABULARY_READ) if share == 0 else None)

    return work


def read_vocabulary(path: Path) -> Callable[[int], None]:
    """Do what the API process does."""

    def work(_: int) -> None:
        vocabulary = LlamaVocabulary.load(path)
        vocabulary.check()
        assert len(vocabulary.pieces) == vocabulary.size
        assert (
            vocabulary.special_tokens.keys()
            | vocabulary.special_texts.keys()
            | {vocabulary.chat_template}
        )
        assert vocabulary.pair_tokens

    return work


def try_flips(model: Path, num_flips: int, seed: int) -> dict[str, object]:
    data, header_bits, rng = (
        model.read_bytes(),
        read_header(model).data_offset * 8,
        random.Random(seed),
    )
    ends: collections.Counter[str] = collections.Counter()
    broken = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "flipped.gguf"
        for _ in range(num_flips):
            bits = [rng.randrange(header_bits) for _ in range(rng.choice((1, 1, 3)))]
            flipped = bytearray(data)
            for bit in bits:
                flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            try:
                read_header(path)
            except StartupError:
                ends["refused by its header"] += 1
                continue
            engine, said = forked(load(path, check_tokens=False))
            caller = (
                engine if engine in (SOUND, REFUSED) else forked(load(path, check_tokens=True))[0]
            )
            api = forked(read_vocabulary(path))[0] if VOCABULARY_READ in said else REFUSED
            ends[f"engine {engine}"] += 1
            if engine > REFUSED or not {caller, api} <= {SOUND, REFUSED}:
                broken.append({"bits": bits, "engine": engine, "api": api, "caller": caller})
    return {"ends": ends, "broken": broken}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    json.dump(try_flips(options.model, options.flips, options.seed), sys.stdout)
