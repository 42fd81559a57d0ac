"""A server connects to nothing, and writes only into its own folders."""

from pathlib import Path

import audited_serve
import openai
import pytest


@pytest.mark.slow
def test_server_connects_to_nothing_and_writes_only_its_files(start_server, tmp_path):
    report, state = tmp_path / "report", tmp_path / "state"
    server = start_server(
        *("--backend.name", "fake", "--api-key", "a-key"),
        program=(audited_serve.__file__, str(report)),
        CLLM_STORAGE_FOLDER=str(state),
    )
    server.client.headers["authorization"] = "Bearer a-key"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a-key", max_retries=0) as client:
        model = client.models.list().data[0].id
        client.completions.create(model=model, prompt="a", max_tokens=4)
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "http://example.com/ file:///etc/passwd"}],
            max_tokens=4,
        )
        client.embeddings.create(model=model, input="a")
        client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        schema = {"$ref": "http://127.0.0.1:9/schema.json"}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "a"}],
            response_format=form,
            max_tokens=4,
        )
    for path in ("/docs", "/openapi.json", "/metrics", "/usage", "/scheduler"):
        assert server.client.get(path).status_code == 200
    assert server.stop() == 0
    lines = report.read_text().splitlines()
    assert any("subprocess.Popen" in line for line in lines)  # the hook works
    connections = [line for line in lines if line.startswith("socket.")]
    assert connections == []
    written = [Path(eval(line[6:])) for line in lines if line.startswith("write '")]
    assert any(path.name == "usage.db" for path in written)
    allowed = (state, Path("/dev/null"), Path("/tmp"), Path("/dev/shm"))
    assert [path for path in written if not any(map(path.is_relative_to, allowed))] == []
    assert {path.stat().st_mode & 0o077 for path in state.rglob("*")} == {0}
