"""LoRA adapters as models, with requests for several at once."""

import concurrent.futures
import itertools
import json
import shutil

import preloaded
import pytest

from cllm.bench.make_adapter import write_adapter
from cllm.models.catalog import BUILTIN

QUESTION = [{"role": "user", "content": "What is 27 plus 45?"}]
INVOCATION = tuple(b"/verse")
LONG = "Tell me a story about a fox. " * 20
SETTINGS = """
model: {{path: cllm-builtin, name: base}}
models: {{other: {{path: cllm-builtin}}}}
adapters:
  one: {{path: {folder}/one.gguf}}
  half: {{path: {folder}/one.gguf, base: base, scale: 0.5}}
  two: {{path: {folder}/two.gguf}}
  elsewhere: {{path: {folder}/two.gguf, base: other}}
  nothing: {{path: {folder}/zero.gguf}}
  late: {{path: {folder}/late.gguf}}
kv: {{max_memory_mb: 100}}
server: {{allow_model_changes: true, enable_faults: true}}
"""


@pytest.fixture(scope="module")
def server(start_server_once, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "one.gguf", BUILTIN, seed=1)
    write_adapter(folder / "two.gguf", BUILTIN, seed=2)
    write_adapter(folder / "zero.gguf", BUILTIN, seed=3, strength=0.0)
    write_adapter(folder / "late.gguf", BUILTIN, seed=4, invocation=INVOCATION)
    (folder / "c.yaml").write_text(SETTINGS.format(folder=folder))
    return start_server_once("--config", str(folder / "c.yaml"))


def complete(server, model, prompt=LONG, **more):
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, **more}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def scores(server, model, prompt=LONG, **more):
    """Return the logprobs of the most probable first tokens."""
    found = complete(server, model, prompt, max_tokens=1, min_tokens=1, logprobs=10, **more)
    return found["choices"][0]["logprobs"]["top_logprobs"][0]


def same(first, second):
    """Whether these are the scores of the same model, which depend slightly on the batch."""
    common = first.keys() & second.keys()
    return len(common) >= 7 and all(abs(first[token] - second[token]) < 0.2 for token in common)


def test_adapters_are_listed_with_the_model_that_they_change(server):
    models = server.client.get("/v1/models").json()["data"]
    parents = {model["id"]: model["parent"] for model in models}
    assert parents == {
        "base": None,
        "other": None,
        "elsewhere": "other",
        **dict.fromkeys(("one", "half", "two", "nothing", "late"), "base"),
    }
    listed = server.client.get("/lora-adapters", params={"model": "half"}).json()
    assert [entry["path"] for entry in listed] == ["one", "half", "two", "nothing", "late"]
    assert [entry["scale"] for entry in listed] == [0, 0.5, 0, 0, 0]
    assert listed[4]["alora_invocation_tokens"] == [*INVOCATION]
    assert "alora_invocation_tokens" not in listed[0]


def test_each_adapter_has_its_own_answers_and_the_base_is_unchanged(server):
    """In any order, and with nothing shared by mistake."""
    names = ["base", "one", "half", "two", "nothing", "elsewhere", "other"]
    before = {name: scores(server, name) for name in names}
    for name in reversed(names):
        assert same(scores(server, name), before[name]), name
    for name in ("nothing", "other"):
        assert same(before[name], before["base"])
    assert same(before["two"], before["elsewhere"])
    different = [before[name] for name in ("base", "one", "half", "two")]
    assert not any(same(*pair) for pair in itertools.combinations(different, 2))
    assert complete(server, "one")["model"] == "one"
    chat = {"model": "nothing", "messages": QUESTION, "temperature": 0}
    answer = server.client.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == "72"


def test_prefixes_are_shared_among_requests_with_the_same_adapter_only(server):
    prompt = "Once there was a clever mouse who lived in the wall. " * 10

    def cached(model):
        usage = complete(server, model, prompt)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("base") == 0
    assert cached("one") > 50
    assert cached("half") == 0


def test_activated_adapter_uses_the_prefix_of_its_base(server):
    """It changes nothing before its invocation, and nothing at all without one."""
    text = "A sailor saw an island behind the fog and rowed there at night. " * 10
    prompt = [*text.encode()]
    assert same(scores(server, "late", prompt), scores(server, "base", prompt))
    invoked = [*prompt, *INVOCATION, *b" of the sea"]
    found = complete(server, "late", invoked, max_tokens=1, min_tokens=1, logprobs=10)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)
    changed = found["choices"][0]["logprobs"]["top_logprobs"][0]
    assert not same(changed, scores(server, "base", invoked))
    for salt in ("a", "b", "b"):  # with new salts, the whole prompt is computed again
        assert same(scores(server, "late", invoked, cache_salt=salt), changed)
    assert same(scores(server, "base", prompt), scores(server, "late", prompt))


@pytest.mark.parametrize("invocation", [[2**31], [1] * 300, [1] * 5000])
def test_adapter_with_impossible_invocation_is_refused(server, tmp_path, invocation):
    path = write_adapter(tmp_path / "odd.gguf", BUILTIN, invocation=invocation)
    body = {"lora_name": "odd", "lora_path": str(path)}
    answer = server.client.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400
    assert "1 to 256 token ids" in answer.json()["error"]["message"]


def test_activated_adapter_cannot_be_combined_with_others(server):
    lora = [{"id": 0, "scale": 1}, {"id": 4, "scale": 1}]
    body = {"model": "base", "prompt": "x", "max_tokens": 1, "lora": lora}
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "lora"
    assert "activated" in error["message"]


def test_requests_with_different_adapters_run_at_the_same_time(server):
    """Each gets what it gets alone, also after the engine has died."""
    names = ["base", "one", "half", "two"]
    alone = {(name, i): scores(server, name, f"{LONG}{i}") for name in names for i in range(4)}
    ask = {"messages": QUESTION, "temperature": 0, "max_tokens": 300, "min_tokens": 100}

    def talk(model):
        answer = server.client.post("/v1/chat/completions", json={"model": model, **ask})
        return answer.json()["choices"][0]["message"]["content"]

    for _ in range(2):
        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            talks = [threads.submit(talk, name) for name in ("nothing", "base") * 4]
            found = {
                key: threads.submit(scores, server, key[0], f"{LONG}{key[1]}") for key in alone
            }
            for key, each in found.items():
                assert same(each.result(), alone[key]), key
            assert {each.result()[:2] for each in talks} == {"72"}
        fault = {"model": "base", "faults": [{"kind": "crash", "after_steps": 6}]}
        assert server.client.post("/faults", json=fault).status_code == 200


def test_request_chooses_adapters_by_their_numbers(server):
    def chosen(model, *lora):
        return scores(server, model, lora=[*lora])

    one, two = {"id": 0}, {"id": 2}
    assert same(chosen("base", one), scores(server, "one"))
    assert same(chosen("one", {"id": 0, "scale": 0.5}), scores(server, "half"))
    assert same(chosen("one"), scores(server, "base"))
    both = chosen("base", one, two)
    assert same(both, chosen("base", two, one))
    assert not same(both, scores(server, "one"))
    assert not same(both, scores(server, "two"))
    body = {"model": "base", "prompt": "x", "lora": [{"id": 5}]}
    refused = server.client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora"


def test_created_model_keeps_the_adapter(server):
    body = {"model": "poet", "from": "one", "system": "Be brief.", "stream": False}
    assert server.client.post("/api/create", json=body).json() == {"status": "success"}
    assert same(scores(server, "poet"), scores(server, "one"))
    assert server.client.post("/api/create", json={**body, "from": "base"}).is_success
    assert same(scores(server, "poet"), scores(server, "base")), "it was made anew"
    assert server.client.request("DELETE", "/api/delete", json={"model": "poet"}).is_success
    assert server.client.request("DELETE", "/api/delete", json={"model": "one"}).status_code == 400


def test_adapters_have_no_embeddings(server):
    body = {"model": "one", "input": "x"}
    answer = server.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert "adapter" in answer.json()["error"]["message"]
    assert server.client.post("/v1/embeddings", json={**body, "model": "base"}).is_success


def test_salt_cannot_reach_the_prefixes_of_an_adapter(server):
    body = {"model": "base", "prompt": "x", "cache_salt": "\0\0one"}
    assert server.client.post("/v1/completions", content=json.dumps(body)).status_code in (400, 415)
    assert server.client.post("/v1/completions", json=body).status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adapters: {a: {path: /nowhere.gguf}}", "adapters.a: there is no file /nowhere.gguf"),
        ("adapters: {a: {path: c.yaml, base: x}}", "adapters.a.base: there is no model x"),
        ("adapters: {a: {path: c.yaml}}\nmodel: {name: a}", "adapters.a has the name of a model"),
        ("adapters: {a: {path: c.yaml}}", "the adapter a cannot be loaded"),
    ],
)
def test_start_with_a_faulty_adapter_fails_with_one_line(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text.replace("c.yaml", str(tmp_path / "c.yaml")))
    done = preloaded.run("serve", "--port", "0", "--config", tmp_path / "c.yaml")
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_adapter_of_a_found_model_comes_back_with_it(start_server, tmp_path):
    folder, away = tmp_path / "models", tmp_path / "away.gguf"
    folder.mkdir()
    shutil.copy(BUILTIN, folder / "found.gguf")
    write_adapter(tmp_path / "a.gguf", BUILTIN, strength=0.0)
    (tmp_path / "c.yaml").write_text(
        f"models: {{folder: {folder}}}\nkv: {{max_memory_mb: 100}}\n"
        f"adapters: {{poet: {{path: {tmp_path}/a.gguf, base: found}}}}\n"
    )
    server = start_server("--config", str(tmp_path / "c.yaml"))

    def names():
        listed = server.client.get("/v1/models", params={"reload": True}).json()["data"]
        return [model["id"] for model in listed]

    assert names() == ["found", "poet"]
    (folder / "found.gguf").rename(away)
    assert names() == []
    away.rename(folder / "found.gguf")
    assert names() == ["found", "poet"]
    chat = {"model": "poet", "messages": QUESTION, "temperature": 0}
    answer = server.client.post("/v1/chat/completions", json=chat).json()
    assert answer["choices"][0]["message"]["content"] == "72"


def load(server, name, path, **more):
    body = {"lora_name": name, "lora_path": str(path), **more}
    return server.client.post("/v1/load_lora_adapter", json=body)


def test_adapters_are_loaded_and_forgotten_while_the_server_runs(server, tmp_path):
    """As in vLLM. A request that has begun with a former file of an adapter goes on with that."""
    write_adapter(tmp_path / "new.gguf", BUILTIN, seed=1)
    before = {name: scores(server, name) for name in ("base", "one", "two")}
    answer = load(server, "fresh", tmp_path / "new.gguf")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'fresh' added successfully.",
    )
    assert same(scores(server, "fresh"), before["one"])
    assert same(scores(server, "base"), before["base"])
    listed = server.client.get("/lora-adapters").json()
    assert [entry["path"] for entry in listed] == ["one", "half", "two", "nothing", "late", "fresh"]
    assert same(scores(server, "base", lora=[{"id": 5}]), before["one"])
    assert load(server, "fresh", tmp_path / "new.gguf").status_code == 400
    write_adapter(tmp_path / "other.gguf", BUILTIN, seed=2)
    assert load(server, "fresh", tmp_path / "other.gguf", load_inplace=True).status_code == 200
    assert same(scores(server, "fresh"), before["two"])
    server.client.post("/faults", json={"faults": [{"kind": "crash"}]})
    assert same(scores(server, "fresh"), before["two"])  # in the next engine too
    forget = {"lora_name": "fresh"}
    assert server.client.post("/v1/unload_lora_adapter", json=forget).status_code == 200
    asked = server.client.post("/v1/completions", json={"model": "fresh", "prompt": "x"})
    assert asked.status_code == 404
    assert server.client.post("/v1/unload_lora_adapter", json=forget).status_code == 404


def test_adapter_whose_file_is_gone_does_not_keep_its_base_from_loading(server, tmp_path):
    """Whether it has been forgotten before or not."""
    before = scores(server, "base")
    for forget in (True, False):
        path = tmp_path / "gone.gguf"
        write_adapter(path, BUILTIN, seed=1)
        assert load(server, "gone", path, load_inplace=True).status_code == 200
        if forget:
            answer = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "gone"})
            assert answer.status_code == 200
        path.unlink()
        server.client.post("/models/unload", json={"model": "base"}).raise_for_status()
        assert same(scores(server, "base"), before)
    asked = server.client.post("/v1/completions", json={"model": "gone", "prompt": "x"})
    assert asked.status_code in (500, 503)
    server.client.post("/v1/unload_lora_adapter", json={"lora_name": "gone"}).raise_for_status()


def test_what_is_no_adapter_is_refused(server, tmp_path):
    missing = load(server, "bad", tmp_path / "missing.gguf")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_path")
    (tmp_path / "text.gguf").write_text("no adapter")
    for path in (tmp_path / "text.gguf", BUILTIN):
        refused = load(server, "bad", path)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
    assert load(server, "bad", tmp_path).status_code == 404
    assert load(server, "base", tmp_path / "text.gguf").status_code == 400
    answer = server.client.post("/v1/unload_lora_adapter", json={"lora_name": "one"})
    assert answer.status_code == 404  # it is in the settings
    assert complete(server, "base")["model"] == "base"


def test_scales_of_a_model_are_set(server):
    """As in llama-server: for its requests that name no adapters."""
    before = {name: scores(server, name) for name in ("base", "half", "two")}
    try:
        answer = server.client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        assert answer.status_code == 200, answer.text
        assert next(entry["scale"] for entry in server.client.get("/lora-adapters").json()) == 0.5
        assert same(scores(server, "base"), before["half"])
        assert same(scores(server, "base", lora=[{"id": 2}]), before["two"])
        for body in ([{"id": 99}], {"id": 0}, [{"id": 0, "scale": "much"}]):
            assert server.client.post("/lora-adapters", json=body).status_code == 400
    finally:
        server.client.post("/lora-adapters", json=[])
    assert same(scores(server, "base"), before["base"])


def test_adapters_cannot_be_changed_unless_that_is_allowed(fake_server):
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("/lora-adapters", []),
    ):
        assert fake_server.client.post(path, json=body).status_code == 403
