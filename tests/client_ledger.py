"""The tokens that clients are told, to compare them with what a server has counted."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file

COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
ACCOUNTS = ("ann", "bob")
MODELS = ("large", "small")
CONFIG = "models: {large: {preload: true}, small: {preload: true}}\nbackend: {name: fake}\n"


def write_accounts(path: Path) -> None:
    """Write a file of keys: ``root`` is an administrator; the key of ann is "key of ann"."""
    records = {
        name: AccountRecord(keys=(Key(hash_key(f"key of {name}"), 0),), admin=name == "root")
        for name in (*ACCOUNTS, "root")
    }
    write_key_file(path, KeyFile(accounts=records))


class ClientLedger:
    """``told`` has the counts by (account, model, count), as the clients were told them."""

    def __init__(self) -> None:
        self.told: Counter[tuple[str, str, str]] = Counter()
        self._numbers = itertools.count()

    def use(self, server: Any, num_rounds: int = 2) -> None:
        """Let both accounts ask both models in several dialects, at the same time."""
        bodies = [one for _ in range(num_rounds) for one in self._make_requests()]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            for name, model, counts in pool.map(lambda one: ask(server, *one), bodies):
                self.told.update({(name, model, kind): counts[kind] for kind in COUNTS})

    def _make_requests(self) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        for name, model in itertools.product(ACCOUNTS, MODELS):
            text = f"question {next(self._numbers)} of {name}"
            chat = {"model": model, "messages": [{"role": "user", "content": text}]}
            yield name, model, "/v1/chat/completions", {**chat, "max_tokens": 5}
            stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 7}
            yield name, model, "/v1/chat/completions", {**chat, **stream}
            yield name, model, "/v1/completions", {"model": model, "prompt": text, "max_tokens": 3}
            yield name, model, "/v1/embeddings", {"model": model, "input": [text, "more"]}


def ask(
    server: Any, name: str, model: str, path: str, body: dict[str, Any]
) -> tuple[str, str, Counter[str]]:
    headers = {"authorization": f"Bearer key of {name}"}
    answer = server.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    text = answer.text.split("data: ")[-2] if body.get("stream") else answer.text
    usage = json.loads(text)["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return (
        name,
        model,
        Counter(
            requests=1,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=cached,
            completion_tokens=usage.get("completion_tokens", 0),
        ),
    )


def count(rows: list[dict[str, Any]]) -> Counter[tuple[str, str, str]]:
    """Return the counts of a server's rows as ``ClientLedger.told`` has them."""
    counted: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        counted.update({(row["account"], row["model"], kind): row[kind] for kind in COUNTS})
    return counted
