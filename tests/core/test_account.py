"""Accounts."""

import pytest

from cllm.core.account import Account
from cllm.core.request import Priority

INTERACTIVE, NORMAL, BATCH = Priority


@pytest.mark.parametrize(
    ("asked", "highest", "given"),
    [
        (None, None, NORMAL),
        (INTERACTIVE, None, INTERACTIVE),
        (BATCH, None, BATCH),
        (None, BATCH, BATCH),
        (INTERACTIVE, BATCH, BATCH),
        (INTERACTIVE, NORMAL, NORMAL),
        (None, INTERACTIVE, INTERACTIVE),
        (BATCH, INTERACTIVE, BATCH),
    ],
)
def test_priority_never_exceeds_that_of_the_account(asked, highest, given):
    assert Account("user-ann", highest).choose_priority(asked) is given
