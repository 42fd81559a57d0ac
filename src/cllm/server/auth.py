"""Finds the account of a request by its credentials."""

from __future__ import annotations

import hashlib
import re

from starlette.requests import Request

from cllm.config import Settings
from cllm.core.account import Account
from cllm.core.request import Priority


def account_name_of(request: Request) -> str:
    """Return the name of the account with the request's API key, "" if it has no key.

    The key is taken from Authorization, else from x-api-key.
    """
    authorization = request.headers.get("authorization", "").strip()
    key = re.sub(r"^bearer(\s+|$)", "", authorization, flags=re.IGNORECASE)
    key = key or request.headers.get("x-api-key", "").strip()
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:16]}" if key else ""


def make_account(name: str, settings: Settings) -> Account:
    """Return the account ``name`` with its settings."""
    priority = settings.scheduler.priorities.get(name)
    return Account(name, None if priority is None else Priority[priority.upper()])
