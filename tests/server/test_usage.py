"""What accounts have used, by model and day, and ``cllm usage``."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime

import pytest
from client_ledger import CONFIG, COUNTS, ClientLedger, count, write_accounts

from cllm.cli.main import main


@pytest.fixture
def usage_command(capsys, monkeypatch):
    """Return a function that runs ``cllm usage`` with the key of an account."""

    def run(server, *arguments, name="root"):
        code: int | str | None = 0
        with monkeypatch.context() as patch:  # the servers must not get the key
            patch.setenv("CLLM_API_KEY", f"key of {name}")
            try:
                main(["usage", server.url, *arguments])
            except SystemExit as end:
                code = end.code
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


@pytest.fixture
def serve(start_server, tmp_path):
    """Return a function that starts a server of two models, always with the same folder."""
    write_accounts(tmp_path / "keys.json")
    (tmp_path / "cllm.yaml").write_text(CONFIG)

    def start():
        return start_server(
            "--config",
            str(tmp_path / "cllm.yaml"),
            CLLM_SERVER_KEYS_FILE=str(tmp_path / "keys.json"),
            CLLM_STORAGE_FOLDER=str(tmp_path / "state"),
        )

    return start


def test_usage_equals_the_ledger_of_the_clients_over_restarts(serve, usage_command):
    """After a normal end of the server, and after a kill."""
    ledger, days = ClientLedger(), {today()}
    server = serve()
    ledger.use(server)
    server.stop()
    server = serve()
    ledger.use(server)
    usage_command(server)  # this writes what is not on disk yet
    server.process.kill()
    server.process.wait()
    server = serve()
    ledger.use(server, num_rounds=1)

    code, out, err = usage_command(server, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert count(rows) == ledger.told
    assert {row["day"] for row in rows} <= days | {today()}
    written = usage_command(server, "--csv")[1]
    assert [
        row | {kind: int(row[kind]) for kind in COUNTS}
        for row in csv.DictReader(io.StringIO(written))
    ] == rows

    table = usage_command(server, "--by", "model")[1].splitlines()
    assert table[0].split()[:2] == ["model", "requests"]
    requests = [ledger.told["ann", name, "requests"] * 2 for name in ("large", "small")]
    assert [line.split()[:2] for line in table[1:]] == [
        ["large", str(requests[0])],
        ["small", str(requests[1])],
        ["total", str(sum(requests))],
    ]
    own = json.loads(usage_command(server, "--json", name="ann")[1])
    assert {row["account"] for row in own} == {"ann"}
    code, out, err = usage_command(server, "--account", "bob", name="ann")
    assert (code, out, err.count("\n")) == (2, "", 1)
    code, out, err = usage_command(server, "--by", "account,colour")
    assert (code, out) == (2, "")
    assert "account, day, model" in err


def today():
    return datetime.now(UTC).date().isoformat()
