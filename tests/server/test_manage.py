"""Models that clients create, copy, delete and find in the hub's cache, with Ollama's own client."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import ollama
import pytest

from cllm.errors import BadRequest, StartupError
from cllm.models.catalog import BUILTIN
from cllm.server.ollama.modelfile import read_modelfile
from cllm.store.created import FILE, CreatedModel, CreatedModels

QUESTION = [{"role": "user", "content": "What is 27 plus 45?"}]
MODELFILE = '''
# a comment
FROM base
PARAMETER temperature 0.25
PARAMETER num_predict 2
PARAMETER stop "<|im_end|>"
SYSTEM """You are a
clever helper."""
LICENSE free
'''


@pytest.fixture(scope="module")
def start(start_server_once, tmp_path_factory):
    """A function that starts the same server again, in the same folders."""
    folder = tmp_path_factory.mktemp("manage")
    cached = folder / "hf" / "hub" / "models--o--r" / "snapshots" / "1"
    cached.mkdir(parents=True)
    blobs = cached.parents[1] / "blobs"
    blobs.mkdir()
    for name in ("m-Q8_0", "m-Q4_0"):
        shutil.copy(BUILTIN, blobs / name)
        (cached / f"{name}.gguf").symlink_to(blobs / name)
    (folder / "c.yaml").write_text(
        "models: {hub_cache: true, base: {path: cllm-builtin}}\n"
        "kv: {max_memory_mb: 100}\nserver: {allow_model_changes: true}\n"
    )

    clients = []

    def start():
        server = start_server_once(
            *("--config", str(folder / "c.yaml"), "--storage.folder", str(folder / "state")),
            HF_HOME=str(folder / "hf"),
            HF_HUB_CACHE=str(folder / "hf" / "hub"),
        )
        server.folder = folder
        server.ollama = ollama.Client(server.url)
        clients.append(server.ollama)
        return server

    yield start
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def server(start):
    return start()


def names(server):
    return {model.model for model in server.ollama.list().models}


def ask(server, model, **more):
    answer = server.ollama.chat(model, QUESTION, options={"temperature": 0, **more})
    return answer.message.content


def test_cached_models_are_served_by_all_their_names(server):
    assert {"o/r:Q8_0", "o/r:Q4_0", "base:latest"} <= names(server)
    assert ask(server, "o/r:Q8_0") == ask(server, "hf.co/o/r:Q8_0") == ask(server, "o/r") == "72"
    for tag in ("latest", "q8_0", "m-Q8_0.gguf"):  # as after ``cllm run --url`` of such a name
        assert server.client.get(f"/v1/models/o/r:{tag}").status_code == 200
    body = {"model": "hf:o/r:Q8_0", "messages": QUESTION, "max_tokens": 1}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200


def test_copy_is_served_and_survives_a_restart_and_its_removal_too(start):
    server = start()
    server.ollama.copy("base", "mine")
    assert ask(server, "mine") == "72"
    assert server.client.get("/v1/models/mine").json()["root"] == "mine"
    server.stop()
    server = start()
    assert "mine:latest" in names(server)
    assert ask(server, "mine") == "72"
    server.ollama.delete("mine")
    assert "mine:latest" not in names(server)
    with pytest.raises(ollama.ResponseError) as raised:
        ask(server, "mine")
    assert raised.value.status_code == 404
    server.stop()
    server = start()
    assert "mine:latest" not in names(server)
    server.stop()


def test_created_model_has_its_own_system_message_and_parameters(server):
    statuses = [
        line.status
        for line in server.ollama.create(
            "short",
            from_="base",
            system="Be brief.",
            parameters={"num_predict": 1, "temperature": 0.125, "num_ctx": 99, "stop": ["x"]},
            stream=True,
        )
    ]
    assert statuses[-1] == "success"
    shown = server.ollama.show("short")
    assert "SYSTEM Be brief." in shown.modelfile
    assert "FROM base" in shown.modelfile
    assert "temperature                    0.125" in shown.parameters
    assert shown.details.parent_model == "base"
    answer = server.ollama.chat("short", QUESTION)
    assert answer.eval_count == 1
    plain = server.ollama.chat("base", QUESTION, options={"num_predict": 1})
    assert answer.prompt_eval_count > plain.prompt_eval_count, "it has a system message"
    own = [{"role": "system", "content": "Be kind."}, *QUESTION]
    both = [server.ollama.chat(name, own).prompt_eval_count for name in ("short", "base")]
    assert both[0] == both[1], "the conversation's own system message replaces it"
    assert server.ollama.ps().models[0].model == "base:latest"


def test_modelfile_is_read(server):
    body = {"name": "filed", "modelfile": MODELFILE, "stream": False}
    assert server.client.post("/api/create", json=body).json() == {"status": "success"}
    assert server.ollama.show("filed").modelinfo
    assert "clever helper" in server.ollama.show("filed").modelfile
    exported = server.ollama.show("filed").modelfile
    body = {"name": "again", "modelfile": exported, "stream": False}
    assert server.client.post("/api/create", json=body).json() == {"status": "success"}
    shown = server.ollama.show("again")
    assert shown.modelfile == exported
    assert server.ollama.chat("again", QUESTION).eval_count == 2


def test_deleting_a_cached_model_removes_its_files(server):
    (file,) = server.folder.rglob("snapshots/1/m-Q4_0.gguf")
    target = file.resolve()
    server.ollama.delete("o/r:Q4_0")
    assert not file.is_symlink()
    assert not target.exists()
    assert "o/r:Q4_0" not in names(server)
    assert ask(server, "o/r:Q8_0") == "72"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "create", {"model": "x", "from": "nothing"}, 404, "not found"),
        ("POST", "create", {"model": "x"}, 400, "'from'"),
        ("POST", "create", {"model": "base", "from": "o/r"}, 400, "not created here"),
        ("POST", "create", {"model": "x", "from": "base", "template": "{{ .P }}"}, 400, "template"),
        ("POST", "create", {"model": "x", "from": "base", "files": {"a": "b"}}, 400, "files"),
        (
            "POST",
            "create",
            {"model": "x", "from": "base", "parameters": {"top_p": 7}},
            400,
            "top_p",
        ),
        ("POST", "create", {"model": "x", "modelfile": "FRM x"}, 400, "FRM x"),
        ("POST", "create", {"model": "x", "modelfile": "SYSTEM x"}, 400, "FROM"),
        ("POST", "create", {"model": "x\n", "from": "base"}, 400, "a word"),
        ("POST", "copy", {"source": "base"}, 400, "destination"),
        ("POST", "copy", {"source": "nothing", "destination": "x"}, 404, "not found"),
        ("DELETE", "delete", {"model": "base"}, 400, "settings"),
        ("DELETE", "delete", {"model": "nothing"}, 404, "not found"),
        ("DELETE", "delete", {}, 400, "model"),
    ],
)
def test_faulty_requests_change_nothing(server, method, path, body, status, words):
    before = names(server)
    answer = server.client.request(method, f"/api/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]
    assert names(server) == before


def test_changes_need_permission(fake_server):
    for method, path, body in (
        ("POST", "create", {"model": "x", "from": "fake"}),
        ("POST", "copy", {"source": "fake", "destination": "x"}),
        ("DELETE", "delete", {"model": "fake"}),
    ):
        answer = fake_server.client.request(method, f"/api/{path}", json=body)
        assert answer.status_code == 403
        assert "server.allow_model_changes" in answer.json()["error"]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("from a", {"from": "a", "parameters": {}}),
        ('FROM a\nSYSTEM "x y"', {"from": "a", "system": "x y", "parameters": {}}),
        (
            "FROM a\nPARAMETER seed 3\nPARAMETER stop a b\nPARAMETER stop c\nPARAMETER mlock true",
            {"from": "a", "parameters": {"seed": 3, "stop": ["a b", "c"], "mlock": True}},
        ),
        (
            'FROM a\nTEMPLATE """x\ny"""\n\n# z\nADAPTER b',
            {"from": "a", "template": "x\ny", "adapters": ["b"], "parameters": {}},
        ),
    ],
)
def test_modelfiles(text, fields):
    assert read_modelfile(text) == fields


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": 9, "models": {"x": {"new": 1}}}', "written by a newer version"),
        ('{"format": 1, "models": {"x": {"new": 1}}}', "is damaged"),
        ("[]", "is damaged"),
    ],
)
def test_file_that_cannot_be_used_is_kept(tmp_path, content, words):
    path = tmp_path / FILE
    path.write_text(content)
    with pytest.raises(StartupError, match=words):
        CreatedModels(tmp_path)
    assert path.read_text() == content


def test_created_models_are_in_a_private_file(tmp_path):
    created = CreatedModels(tmp_path / "new")
    created.put("x", CreatedModel("base", "Be brief.", {"top_k": 3}))
    assert CreatedModels(tmp_path / "new").read() == created.read()
    assert (tmp_path / "new" / FILE).stat().st_mode & 0o77 == 0
    created.remove("x")
    assert CreatedModels(tmp_path / "new").read() == {}


def test_parallel_changes_are_all_kept(server):
    def copy(number):
        body = {"source": "base", "destination": f"copy-{number}"}
        return server.client.post("/api/copy", json=body).status_code

    with ThreadPoolExecutor(16) as threads:
        assert {*threads.map(copy, range(32))} == {200}
        wanted = {f"copy-{number}" for number in range(32)}
        assert wanted <= CreatedModels(server.folder / "state").read().keys()
        assert {f"{name}:latest" for name in wanted} <= names(server)

        def delete(name):
            return server.client.request("DELETE", "/api/delete", json={"model": name}).status_code

        assert {*threads.map(delete, wanted)} == {200}
    assert not wanted & CreatedModels(server.folder / "state").read().keys()


@pytest.mark.parametrize("name", [":latest", " ", "a b", "*", "[a]", "a?", "x" * 400])
def test_names_that_could_not_be_asked_for_are_refused(server, name):
    body = {"source": "base", "destination": name}
    assert server.client.post("/api/copy", json=body).status_code == 400


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": "abc"},
        {"temperature": -5},
        {"top_k": "x"},
        {"num_predict": 2**70},
        {"num_predict": "x"},
        {"seed": 2**70},
    ],
)
def test_parameters_that_no_request_could_have_are_refused(server, parameters):
    body = {"model": "faulty", "from": "base", "parameters": parameters, "stream": False}
    assert server.client.post("/api/create", json=body).status_code == 400
    assert "faulty:latest" not in names(server)


def test_parameters_mean_what_they_mean_in_a_request(server):
    parameters = {"top_k": -1, "repeat_penalty": 1.5, "repeat_last_n": 0, "num_predict": -1}
    server.ollama.create("plain", from_="base", parameters=parameters)
    own = CreatedModels(server.folder / "state").read()["plain"].sampling
    assert own["top_k"] == 0
    assert own.get("repetition_penalty", 1.0) == 1.0
    assert "max_tokens" not in own
    assert ask(server, "plain") == "72"


def test_created_model_without_its_base_can_be_deleted(start, server):
    created = CreatedModels(server.folder / "state")
    created.put("orphan", CreatedModel("nothing"))
    created.put("base", CreatedModel("o/r:Q8_0"))
    created.put("hot", CreatedModel("base", sampling={"temperature": "hot", "nosuch": 1}))
    again = start()
    assert not {"orphan:latest", "hot:latest"} & names(again)
    assert ask(again, "base") == "72"
    assert again.ollama.show("base").details.parent_model == "", "it is the model in the settings"
    for line in (
        "orphan is not served: nothing is not",
        "base is not served: another",
        "hot is not",
    ):
        again.wait_for_log(line)
    for name in ("orphan", "hot"):
        again.ollama.delete(name)
    assert not {"orphan", "hot"} & CreatedModels(server.folder / "state").read().keys()
    created.remove("base")
    again.stop()


def test_huge_keep_alive_is_for_ever(server):
    for value in (1e300, "999999999999999h", "9" * 400 + "h"):
        body = {"model": "base", "keep_alive": value}
        assert server.client.post("/api/generate", json=body).status_code == 200
        assert server.ollama.ps().models[0].expires_at.year == 2999


def test_long_modelfile_is_read_quickly():
    lines = "FROM a\n" + 'SYSTEM "x\n' * 6000
    begun = time.process_time()
    assert read_modelfile(lines)["system"] == '"x'
    assert time.process_time() - begun < 1


@pytest.mark.parametrize("text", ['FROM a\nSYSTEM """x', 'FROM a\nSYSTEM """x""" y'])
def test_unclosed_text_is_refused(text):
    with pytest.raises(BadRequest, match="not closed"):
        read_modelfile(text)
