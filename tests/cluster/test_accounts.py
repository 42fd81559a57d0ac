"""What accounts pay at a front, and what they may use."""

import asyncio
import json
from datetime import date
from types import SimpleNamespace

import httpx2
import pytest
from cluster.conftest import KEY
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from cllm.cluster.accounts import Accounts, NeedsTokens
from cllm.cluster.body import NOTHING, read_fields
from cllm.config.settings import Settings
from cllm.core.account import Account, AccountLimits
from cllm.core.carried import Carried, decode_carried, encode_carried
from cllm.core.request import Priority
from cllm.errors import RateLimited, StartupError
from cllm.server.access import Access, check_access
from cllm.server.auth import ACCOUNT, Guard
from cllm.server.errors import describe
from cllm.serving.delivered import Ending
from cllm.store.charges import UsageCounts
from cllm.store.keys import AccountRecord, Key, KeyFile, hash_key, write_key_file
from cllm.store.usage_reports import ReportBatch, UsageReport, UsageReports

CHAT = "/v1/chat/completions"
NOBODY = Carried(Account("ann"), Account("ann"))


@pytest.fixture
def access(tmp_path):
    return Access(make_settings(tmp_path))


@pytest.fixture
def accounts(access):
    access.ledger.is_valid = lambda _: True
    return Accounts(access, "front1")


def make_request(access, account=None, key=""):
    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "headers": [(b"authorization", f"Bearer {key}".encode())] if key else [],
        "client": ("10.0.0.7", 1),
        "app": SimpleNamespace(state=SimpleNamespace(access=access)),
    }
    if account is not None:
        scope[ACCOUNT] = account
    return Request(scope)


def make_account(**limits):
    return AccountRecord(**limits).make_account("ann")


def body(**fields):
    data = json.dumps({"messages": [], **fields}).encode()
    return read_fields(data), len(data)


def carried_by(admission):
    return decode_carried(admission.encode("replica1", []))


def used(accounts):
    return accounts.access.ledger.totals().get("ann", UsageCounts())


@pytest.mark.parametrize(
    ("key", "fields", "scheduled"),
    [
        ("secret", {}, "key-"),
        ("", {"user": "ann"}, "user-ann"),
        ("", {"metadata": {"user_id": "ann"}}, "user-ann"),
        ("", {"user": 7}, "address-10.0.0.7"),
        ("", {}, "address-10.0.0.7"),
    ],
)
def test_account_of_an_open_server_comes_from_key_user_or_address(
    access, accounts, key, fields, scheduled
):
    carried = carried_by(accounts.admit(make_request(access, key=key), CHAT, *body(**fields)))
    assert carried.scheduled.name.startswith(scheduled)
    assert carried.account.name == (carried.scheduled.name if key else "")
    assert carried.account.is_admin
    assert carried.weight == (3.0 if scheduled == "user-ann" else 1.0)
    assert (carried.replica, carried.front) == ("replica1", "front1")


def test_rights_and_class_of_an_account_are_carried_but_not_its_limits(access, accounts):
    account = make_account(priority="batch", models=("small",), requests_per_minute=3)
    carried = carried_by(accounts.admit(make_request(access, account), CHAT, *body()))
    assert carried.account.priority == Priority.BATCH
    assert carried.account.models == ("small",)
    assert carried.account.limits == AccountLimits()
    assert carried.account.is_carried
    assert carried.account.num_reserved is None


def test_front_pays_what_the_replica_says(access, accounts):
    admission = accounts.admit(make_request(access, make_account()), CHAT, *body())
    admission.note_usage(UsageCounts(1, 10, 4, 5))
    admission.close()
    assert used(accounts) == UsageCounts(1, 10, 4, 5)


def test_request_with_several_prompts_counts_as_several(access, accounts):
    admission = accounts.admit(make_request(access, make_account()), CHAT, *body())
    admission.note_usage(UsageCounts(3, 10, 4, 5))
    admission.close()
    assert used(accounts) == UsageCounts(3, 10, 4, 5)


def test_second_attempt_is_paid_only_once(access, accounts):
    admission = accounts.admit(make_request(access, make_account()), CHAT, *body())
    admission.encode("replica1", [])
    first = admission.id
    admission.encode("replica2", [])
    usage = b'{"requests":1,"prompt_tokens":10,"cached_tokens":0,"completion_tokens":5}'
    admission.end({b"x-cllm-usage": usage}, is_stream=False)
    admission.close()
    accounts.take("replica1", ReportBatch("e", [UsageReport(1, "ann", first, UsageCounts(1))]))
    assert used(accounts) == UsageCounts(1, 10, 0, 5)


def test_nonsense_of_a_replica_is_no_usage(access, accounts):
    values = [b"", b"7", b"{", b'{"requests":"x"}', b'{"requests":-1}']
    values += [b'{"prompt_tokens":-9}', b'{"completion_tokens":%d}' % 10**25]
    for value, needed in zip(values, [b"-1", b"9" * 5000] * len(values), strict=False):
        admission = accounts.admit(make_request(access, make_account()), CHAT, *body())
        admission.encode("replica1", [])
        admission.end({b"x-cllm-usage": value, b"x-cllm-needed-tokens": needed}, is_stream=False)
        admission.close()
        assert accounts.awaited == {"replica1"}


def test_last_progress_of_a_stream_tells_its_usage(access, accounts):
    admission = accounts.admit(make_request(access, make_account()), CHAT, *body())
    admission.encode("replica1", [])
    admission.note_ending(Ending(10, 5, 4, 0))
    admission.close()
    assert used(accounts) == UsageCounts(1, 10, 4, 5)


def test_rejected_request_costs_nothing(access, accounts):
    account = make_account(requests_per_minute=1)
    for _ in range(3):
        admission = accounts.admit(make_request(access, account), CHAT, *body())
        admission.encode("replica1", [])
        admission.end({}, is_stream=False)
        admission.close()
    assert used(accounts).requests == 3  # the total since the start has those taken back too
    assert access.ledger.of_month("ann") == UsageCounts()


def test_request_for_which_no_reservation_is_enough_keeps_none(access, accounts):
    account = make_account(tokens_per_minute=1000)
    admission = accounts.admit(make_request(access, account), CHAT, *body(max_tokens=5))
    admission.encode("replica1", [])
    with pytest.raises(NeedsTokens):
        admission.end({b"x-cllm-needed-tokens": b"900"}, is_stream=False)
    admission.close()
    assert not accounts.awaited
    assert access.ledger.list_left(account)["tokens"][:2] == (1000, 1000)


def test_usage_of_an_aborted_request_comes_with_a_report(access, accounts):
    account = make_account(concurrent_requests=1)
    admission = accounts.admit(make_request(access, account), CHAT, *body())
    admission.encode("replica1", [])
    admission.received.prompt_tokens, admission.received.completion_tokens = 10, 2
    admission.close()
    assert accounts.awaited == {"replica1"}
    report = UsageReport(1, "ann", admission.id, UsageCounts(1, 10, 0, 3))
    for _ in range(2):
        accounts.take("replica1", ReportBatch("epoch", [report]))
    assert used(accounts) == UsageCounts(1, 10, 0, 3)
    assert not accounts.awaited
    accounts.admit(make_request(access, account), CHAT, *body())


def test_client_pays_what_it_has_received_from_a_replica_that_died(access, accounts):
    admission = accounts.admit(make_request(access, make_account()), CHAT, *body())
    admission.encode("replica1", [])
    admission.received.prompt_tokens, admission.received.completion_tokens = 10, 2
    admission.close()
    accounts.take("replica1", ReportBatch("epoch", []))
    accounts.take("replica2", ReportBatch("epoch", []))
    assert accounts.awaited == {"replica1"}
    accounts.take("replica1", ReportBatch("another epoch", []))
    assert not accounts.awaited
    assert used(accounts) == UsageCounts(1, 10, 0, 2)


def test_running_stream_is_paid_for_and_keeps_its_reservation(access, accounts):
    account = make_account(tokens_per_minute=1000)
    admission = accounts.admit(make_request(access, account), CHAT, *body(max_tokens=300))
    before = carried_by(admission).account.num_reserved
    admission.received.prompt_tokens, admission.received.completion_tokens = 10, 200
    asyncio.run(access.ledger.save())
    assert used(accounts) == UsageCounts(1, 10, 0, 200)
    # a replica that continues the stream needs the whole of it
    assert carried_by(admission).account.num_reserved == before


def test_batches_are_booked_once(access, accounts):
    report = UsageReport(7, "ann", "", UsageCounts(2, 10, 0, 4))
    for _ in range(2):
        accounts.take("replica1", ReportBatch("epoch", [report]))
    assert used(accounts) == UsageCounts(2, 10, 0, 4)
    assert accounts.last_taken("replica1") == ("epoch", 7)
    report.number = 1  # of a replica that was started again
    accounts.take("replica1", ReportBatch("another epoch", [report]))
    assert accounts.last_taken("replica1") == ("another epoch", 1)
    assert used(accounts) == UsageCounts(4, 20, 0, 8)


def test_batches_are_booked_once_by_a_front_that_starts_again(tmp_path):
    reports = [UsageReport(number, "ann", "", UsageCounts(1, 10, 0, 4)) for number in (1, 2, 3)]

    async def run(*batches):
        """Return the usage on disk after a front has taken batches of reports."""
        access = Access(make_settings(tmp_path))
        accounts = Accounts(access, "front1")
        await access.ledger.open(tmp_path)
        before = accounts.last_taken("replica1", is_saved=True)
        for batch in batches:
            accounts.take("replica1", ReportBatch("epoch", batch))
        # a replica must not forget what is only in memory
        assert accounts.last_taken("replica1", is_saved=True) == before
        await access.ledger.save()
        assert accounts.last_taken("replica1", is_saved=True) == ("epoch", len(batches) + 1)
        [(*_, counts)] = await access.ledger.list_days(date(2000, 1, 1), date(3000, 1, 1))
        await access.ledger.close()
        return counts

    assert asyncio.run(run(reports[:2])) == UsageCounts(2, 20, 0, 8)
    assert asyncio.run(run(reports[:2], reports)) == UsageCounts(3, 30, 0, 12)


def test_parallel_requests_cannot_exceed_a_limit_together(access, accounts):
    account = make_account(tokens_per_minute=100)
    first = accounts.admit(make_request(access, account), CHAT, *body(max_tokens=60))
    second = accounts.admit(make_request(access, account), CHAT, *body(max_tokens=60))
    shares = [carried_by(one).account.num_reserved for one in (first, second)]
    assert sum(shares) <= 100
    with pytest.raises(RateLimited):
        second.reserve(70)  # what the replica says that it needs
    first.note_usage(UsageCounts(1, 10, 0, 20))
    first.close()
    third = accounts.admit(make_request(access, account), CHAT, *body(max_tokens=60))
    third.reserve(70)
    assert carried_by(third).account.num_reserved == 70


def test_batches_wait_for_accounts_that_have_used_up_a_limit(tmp_path):
    keys = {name: (Key(hash_key(f"key of {name}"), 0),) for name in ("ann", "bob")}
    limited = {
        "ann": AccountRecord(keys=keys["ann"], requests_per_minute=1),
        "bob": AccountRecord(keys=keys["bob"]),
    }
    write_key_file(tmp_path / "keys.json", KeyFile(accounts=limited))
    accounts = Accounts(Access(make_settings(tmp_path)), "front1")
    assert accounts.list_paused(["ann", "bob", "revoked"]) == ["revoked"]
    used_up = UsageReport(1, "ann", "", UsageCounts(1, 2, 0, 3))
    accounts.take("replica1", ReportBatch("epoch", [used_up]))
    assert accounts.list_paused(["ann", "bob"]) == ["ann"]
    assert accounts.list_paused([]) == []


def test_routes_that_compute_nothing_reserve_nothing(access, accounts):
    account = make_account(requests_per_minute=1)
    for _ in range(3):
        accounts.admit(make_request(access, account), "/tokenize", NOTHING, 2).close()
    assert used(accounts) == UsageCounts()


def test_reports_wait_for_their_front_until_it_has_taken_them():
    reports = UsageReports()
    carried = Carried(Account("ann"), Account("ann"), front="front1")
    reports.add(carried, UsageCounts(1, 2, 0, 3), "r1")
    reports.add(carried, UsageCounts(), "r2")  # it has cost nothing, and the front has no accounts
    reports.add(carried, UsageCounts(1, 4, 0, 5), "")
    assert [one.number for one in reports.take("front1", 0)] == [1, 2]
    assert [one.number for one in reports.take("front1", 1)] == [2]
    assert reports.take("front2", 0) == []
    assert reports.take("front1", 2) == []


def test_weight_of_a_carried_account_reaches_the_policy(access):
    seen = []
    service = SimpleNamespace(engine=SimpleNamespace(set_weights=seen.append))
    for name, weight in (("ann", 4.0), ("ann", 1.0), ("user-ann", 1.0), ("user-ann", 3.0)):
        access.note_carried(Carried(Account(name), Account(name), weight))
        access._check([service])
    assert seen == [
        {"user-ann": 3.0, "ann": 4.0},
        {"user-ann": 3.0},
        {"user-ann": 1.0},  # the front's setting counts
        {"user-ann": 3.0},
    ]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer something"}, 401),
        ({"x-cllm-cluster-key": KEY}, 401),  # it is no account
        ({"x-cllm-cluster-key": KEY, "x-cllm-account": encode_carried(NOBODY)}, 200),
    ],
)
def test_replica_that_other_machines_reach_serves_only_fronts(tmp_path, sent, status):
    settings = make_settings(tmp_path, host="10.0.0.5")
    access = Access(settings)
    check_access(settings, access)
    app = Guard(PlainTextResponse("answer"), access, settings, answer_fault)
    transport = httpx2.ASGITransport(app)

    async def ask():
        async with httpx2.AsyncClient(transport=transport, base_url="http://10.0.0.5") as client:
            return await client.get(CHAT, headers=sent)

    assert asyncio.run(ask()).status_code == status


def test_front_that_other_machines_reach_needs_accounts(tmp_path):
    settings = make_settings(tmp_path, host="10.0.0.5")
    with pytest.raises(StartupError, match="cllm keys add"):
        check_access(settings, Access(settings, is_of_front=True))


def make_settings(folder, **server):
    return Settings.model_validate(
        {
            "server": {"keys_file": str(folder / "keys.json"), **server},
            "cluster": {"key": KEY},
            "scheduler": {"weights": {"user-ann": 3.0}},
        }
    )


def answer_fault(_, error):
    return PlainTextResponse(str(error), describe(error).status)
