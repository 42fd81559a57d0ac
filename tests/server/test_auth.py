"""A request's account is determined by its credentials."""

import hashlib
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from cllm.config import Settings
from cllm.core.account import Account
from cllm.core.request import Priority
from cllm.server.call import Call, call_of


def call(headers, priorities=None):
    settings = Settings.model_validate({"scheduler": {"priorities": priorities or {}}})
    app = SimpleNamespace(state=SimpleNamespace(settings=settings))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return call_of(Request({"type": "http", "headers": raw, "app": app}))


KEY = f"key-{hashlib.sha256(b'secret').hexdigest()[:16]}"


@pytest.mark.parametrize(
    ("headers", "user", "name"),
    [
        ({}, None, ""),
        ({}, "ann", "user-ann"),
        ({"authorization": "Bearer secret"}, "ann", KEY),
        ({"authorization": "bearer   secret "}, None, KEY),
        ({"authorization": "secret"}, None, KEY),
        ({"authorization": "Bearer", "x-api-key": " secret"}, None, KEY),
        ({"authorization": "Bearer "}, "ann", "user-ann"),
    ],
)
def test_api_key_takes_precedence_over_user_as_account(headers, user, name):
    assert call(headers).account(user) == Account(name)


def test_account_has_its_configured_priority():
    asked = call({"authorization": "Bearer secret"}, {KEY: "batch"})
    assert asked.account() == Account(KEY, Priority.BATCH)


def test_request_of_a_batch_has_the_account_of_the_batch():
    state = call({}).state
    assert Call(state, KEY).account("ann") == Account(KEY)
    assert Call(state, "").account("ann") == Account("user-ann")
