"""GET /usage: what accounts have used, and what their limits leave."""

from __future__ import annotations

import csv
import io
import time
from datetime import date
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from cllm.core.account import Account
from cllm.errors import BadRequest
from cllm.server.access import Access
from cllm.server.body import describe_route
from cllm.server.call import get_call
from cllm.server.state import get_state
from cllm.store.usage import first_of_month

router = APIRouter(tags=["cLLM"])


class DayUsage(TypedDict):
    account: str
    day: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class AccountStatus(TypedDict):
    """``left`` is what the limits per minute leave, of requests and tokens."""

    name: str
    limits: dict[str, int]
    tokens_of_month: int
    left: dict[str, int]


class UsageAnswer(TypedDict):
    object: Literal["usage"]
    accounts: list[AccountStatus]
    days: list[DayUsage]


COLUMNS = tuple(DayUsage.__annotations__)

Day = Annotated[str | None, Query(pattern=r"^\d{4}-\d\d-\d\d$")]


@router.get("/usage", openapi_extra=describe_route(answer=UsageAnswer, stream="text/csv"))
async def usage(
    request: Request,
    account: Annotated[str | None, Query(max_length=100)] = None,
    begin: Day = None,
    end: Day = None,
    form: Annotated[Literal["json", "csv"], Query(alias="format")] = "json",
) -> Response:
    """Return what the account of the API key has used, by day (UTC) and model, from the first of
    the month to today unless ``begin`` and ``end`` say otherwise; for an administrator, of all
    accounts, or of ``account``. Prompt tokens include the cached ones. With ``format=csv``, the
    days as CSV.
    """
    own = get_call(request).account()
    access = get_state(request).access
    asked = account if own.is_admin else own.name
    if account not in (None, asked):
        message = "The usage of other accounts needs the API key of an administrator."
        raise BadRequest(message, param="account", code="admin_required", status=403)
    first, last = parse_day(begin, "begin"), parse_day(end, "end")
    rows = await access.ledger.list_days(
        first or first_of_month(time.time()),
        last or date.max,
        None if asked is None else [asked],
    )
    days: list[DayUsage] = [
        {
            "account": name,
            "day": day,
            "model": model,
            "requests": used.requests,
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "completion_tokens": used.completion_tokens,
        }
        for name, day, model, used in rows
    ]
    if form == "csv":
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, COLUMNS)
        table.writeheader()
        table.writerows(days)
        return Response(text.getvalue(), media_type="text/csv")
    shown = (
        {asked}
        if asked is not None
        else {
            *access.keyring.names(),
            *access.keyring.accounts,
            *(name for name, *_ in rows),
        }
    )
    content: UsageAnswer = {
        "object": "usage",
        "accounts": [describe(access, name) for name in sorted(shown)],
        "days": days,
    }
    return Response(to_json(content), media_type="application/json")


def describe(access: Access, name: str) -> AccountStatus:
    """Return the limits of an account, and what it has used of the month and of the minute."""
    account = access.keyring.get(name) or access.keyring.accounts.get(name) or Account(name)
    left = access.ledger.list_left(account)
    return {
        "name": name,
        "limits": {
            limit: value
            for limit, value in msgspec.structs.asdict(account.limits).items()
            if value is not None
        },
        "tokens_of_month": access.ledger.of_month(name).tokens,
        "left": {kind: count for kind, (_, count, _) in left.items()},
    }


def parse_day(text: str | None, param: str) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        message = f"Invalid '{param}': {text} is not a day, such as 2026-01-31."
        raise BadRequest(message, param=param, code="invalid_value") from None
