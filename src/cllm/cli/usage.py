"""``cllm usage``."""

from __future__ import annotations

import csv
import json
import sys
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from cllm.cli.remote import LOCAL, Url, error_message, send
from cllm.cli.table import format_table
from cllm.errors import CLLMError, StartupError

KEYS = ("account", "day", "model")
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
Row = dict[str, Any]


class UsageAnswer(msgspec.Struct):
    """The answer of GET /usage."""

    days: list[Row]


def usage(
    url: Url = LOCAL,
    *,
    by: Annotated[
        str,
        Parameter(help="What has a line of its own: account, day and model, with commas."),
    ] = ",".join(KEYS),
    account: Annotated[str | None, Parameter(help="One account. [default: all]")] = None,
    begin: Annotated[
        str | None,
        Parameter(
            help="The first day (UTC), such as 2026-01-31. [default: the first of the month]"
        ),
    ] = None,
    end: Annotated[str | None, Parameter(help="The last day. [default: today]")] = None,
    as_csv: Annotated[bool, Parameter(name="--csv", help="Print CSV.")] = False,
    as_json: Annotated[
        bool, Parameter(name="--json", help="Print a list of JSON objects.")
    ] = False,
) -> None:
    """Show what accounts have used of a running server, or of a cluster at its front: requests,
    and tokens of prompts (cached ones included) and outputs. CLLM_API_KEY must be the key of an
    administrator; with another key, the usage is that of its account.
    """
    keys = split_keys(by)
    query = {"account": account, "begin": begin, "end": end}
    rows = sum_by(fetch(url, {name: one for name, one in query.items() if one}), keys)
    if as_json:
        print(json.dumps(rows, indent=2))
    elif as_csv:
        table = csv.DictWriter(sys.stdout, [*keys, *COUNTS], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    elif rows:
        total = dict.fromkeys(keys, "") | sum_by(rows, ())[0] | {keys[0]: "total"}
        shown = [*rows, total] if len(rows) > 1 else rows
        head = [name.replace("_", " ") for name in (*keys, *COUNTS)]
        print(format_table([head, *([*row.values()] for row in shown)]))
    else:
        print("cllm: nothing was used in this time", file=sys.stderr)


def split_keys(by: str) -> list[str]:
    """Return the names in ``by``. Raises StartupError if one is unknown or occurs twice."""
    keys = [name.strip() for name in by.split(",")]
    if not set(keys) <= set(KEYS) or len(set(keys)) < len(keys):
        raise StartupError(f"--by takes some of {', '.join(KEYS)}, with commas; not {by!r}")
    return keys


def fetch(url: str, query: dict[str, str]) -> list[Row]:
    """Return the days of GET /usage. Raises StartupError and CLLMError."""
    answer = send(url, "GET", "/usage", params=query, timeout=30)
    if answer.status_code != 200:
        raise CLLMError(f"{error_message(answer)} ({url})")
    try:
        return msgspec.json.decode(answer.content, type=UsageAnswer).days
    except msgspec.MsgspecError as error:
        raise CLLMError(f"the server at {url} is not a cLLM server: {error}") from None


def sum_by(rows: list[Row], keys: tuple[str, ...] | list[str]) -> list[Row]:
    """Return one row for each combination of values of ``keys``, in ascending order."""
    groups: dict[tuple[str, ...], Row] = {}
    for row in rows:
        named = {key: row.get(key, "") for key in keys}
        group = groups.setdefault((*named.values(),), named | dict.fromkeys(COUNTS, 0))
        for name in COUNTS:
            group[name] += row.get(name, 0)
    return [groups[key] for key in sorted(groups)]
