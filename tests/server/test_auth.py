"""A request's account is determined by its credentials."""

import hashlib
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from cllm.config.settings import Settings
from cllm.core.account import Account
from cllm.core.request import Priority
from cllm.server.access import Access
from cllm.server.call import Call, get_call
from cllm.server.queueing import SchedulingBody


def call(headers, priorities=None):
    settings = Settings.model_validate(
        {"scheduler": {"priorities": priorities or {}}, "server": {"keys_file": "/none"}}
    )
    app = SimpleNamespace(state=SimpleNamespace(settings=settings, access=Access(settings)))
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return get_call(Request({"type": "http", "headers": raw, "app": app}))


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
    assert call(headers).account(user) == Account(name, is_admin=True)


def test_account_has_its_configured_priority():
    asked = call({"authorization": "Bearer secret"}, {KEY: "batch"})
    assert asked.account() == Account(KEY, Priority.BATCH, is_admin=True)


def test_request_of_a_batch_has_the_account_of_the_batch():
    state = call({}).state
    assert Call(state, KEY).account("ann") == Account(KEY, is_admin=True)
    assert Call(state, "").account("ann") == Account("user-ann", is_admin=True)


def test_body_names_limits_and_user():
    """``metadata.user_id`` of Anthropic's requests counts if the body has no ``user``."""
    body = SchedulingBody(user="ann", deadline_ms=1500, queue_timeout_ms=250, priority="batch")
    options = body.scheduling_options(call({}), "bob")
    assert options.account.name == "user-ann"
    assert (options.deadline, options.queue_timeout) == (1.5, 0.25)
    assert options.priority is Priority.BATCH
    assert SchedulingBody().scheduling_options(call({}), "bob").account.name == "user-bob"
    keyed = call({"authorization": "Bearer secret"})
    assert body.scheduling_options(keyed, "bob").account.name == KEY
