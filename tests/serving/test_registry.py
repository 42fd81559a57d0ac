"""The model that a name in a request means, and which models are loaded."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from conftest import PATIENCE

from cllm.core.request import AdapterFile
from cllm.errors import (
    EngineError,
    KilledWhileLoading,
    LoadFailed,
    StartupError,
    UnknownModel,
)
from cllm.routing.residency import MIN_STAY
from cllm.serving import loaded_models
from cllm.serving.registry import MAX_NAME, Registry
from cllm.serving.served_model import ServedModel
from cllm.serving.service import Service

MB = 1_000_000
ALIASES = ["gpt-4o", "claude-*", "org/m", "v[12]", "q?", "gpt-4o"]


def registry_of(name="tiny", aliases=ALIASES):
    model = ServedModel(name=name, aliases=aliases)
    return Registry([model]), model


@pytest.mark.parametrize("name", [None, "", "tiny", "tiny:latest"])
@pytest.mark.parametrize("aliases", [ALIASES, []])
def test_own_name_and_missing_name_select_the_default_model(name, aliases):
    registry, model = registry_of(aliases=aliases)
    assert registry.find(name) is model
    assert registry.find() is model


@pytest.mark.parametrize("name", ["tiny", "tiny:latest"])
def test_latest_is_optional_for_a_model_whose_name_has_it(name):
    registry, model = registry_of("tiny:latest")
    assert registry.find(name) is model


@pytest.mark.parametrize("name", ["gpt-4o", "claude-opus", "claude-", "org/m", "v1", "v2", "q8"])
def test_aliases_and_patterns_select_the_model(name):
    registry, model = registry_of()
    assert registry.find(name) is model


@pytest.mark.parametrize(
    "name",
    ["other", "Tiny", "tiny:q4", "gpt-4o:latest", "GPT-4o", "opus-claude-", "v3", "q", "q80"],
)
def test_unknown_name_is_rejected_with_the_served_name(name):
    registry, _ = registry_of()
    with pytest.raises(UnknownModel) as caught:
        registry.find(name)
    error = caught.value
    assert (error.asked, error.served) == (name, "tiny")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert str(error) == f"The model {name!r} does not exist; this server has 'tiny'."


def test_long_name_matches_no_pattern_and_is_truncated_in_the_error():
    registry, model = registry_of(aliases=["*"])
    assert registry.find("a" * MAX_NAME) is model
    with pytest.raises(UnknownModel) as caught:
        registry.find("a" * (MAX_NAME + 1))
    assert caught.value.asked == "a" * 100
    assert "a" * 101 not in str(caught.value)


def test_names_lists_the_model_and_its_aliases_without_patterns():
    registry, model = registry_of()
    assert registry.names == ["tiny", "gpt-4o", "org/m"]
    assert all(registry.find(name) is model for name in registry.names)


# ------------------------------------------------------------------------------ loading and unloading


class StubEngine:
    """An engine whose start takes no time unless ``gate`` is closed."""

    def __init__(self, num_bytes, events, name) -> None:
        self.num_bytes, self._events, self._name = num_bytes, events, name
        self.num_unfinished, self.unloaded, self.ready = 0, False, False
        self.gate = asyncio.Event()
        self.gate.set()
        self.on_wanted = lambda: None
        self.error: Exception | None = None
        self.ended_with = None

    @property
    def has_requests(self):
        return bool(self.num_unfinished)

    def set_unloaded(self):
        self.unloaded = True

    async def start(self, max_bytes):
        self._events.append(f"load {self._name}")
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.unloaded, self.ready, self.max_bytes = False, True, max_bytes

    async def unload(self):
        assert not self.num_unfinished
        self._events.append(f"unload {self._name}")
        self.unloaded, self.ready = True, False

    async def close(self):
        self._events.append(f"close {self._name}")

    def end_all(self, error):
        self.ended_with = error


def stub_service(engine):
    async def close():
        pass

    engine.info = SimpleNamespace(
        context_length=1, kv_bytes_per_token=0, model_bytes=0, on_gpu=False, generates=False
    )
    vocabulary = SimpleNamespace(has_template=False)
    texts = SimpleNamespace(
        engine=engine, metrics=None, vocabulary=vocabulary, end_idle=lambda: None, close=close
    )
    return Service(texts, engine._name)


class Fleet:
    """A registry of models that take 10 MB each, in a memory of 25 MB, and a clock."""

    def __init__(self, names="abc", max_megabytes=25, **options) -> None:
        self.events, self.now, self.errors = [], 0.0, {}
        self.engines = {name: StubEngine(10 * MB, self.events, name) for name in names}
        self.models = {
            name: ServedModel(name=name, open=self._open, **options.get(name, {})) for name in names
        }
        self.registry = Registry(self.models.values(), max_megabytes * MB, clock=lambda: self.now)

    async def _open(self, model):
        model.min_bytes = 10 * MB
        return stub_service(self.engines[model.name])

    async def use(self, name):
        self.now += 1
        return await self.registry.load(self.models[name])

    async def loading(self, name):
        """Begin a request for a model that must be loaded, and return it once it waits."""
        task = asyncio.create_task(self.registry.load(self.models[name]))
        await self.turns()
        return task

    async def turns(self):
        """Let everything happen that can happen now."""
        for _ in range(5):
            await asyncio.sleep(loaded_models.LOOK_SECONDS)

    async def pass_time(self, seconds):
        """Let time pass once the request beside this call waits."""
        await asyncio.sleep(0)
        self.now += seconds

    @property
    def loaded(self):
        return {name for name, model in self.models.items() if model.is_loaded}


async def wait_for_room():
    """Return a fleet whose two loaded models have a request each, and a request for a third one,
    for which the older one is to leave.
    """
    fleet = Fleet()
    for name in "ab":
        await fleet.use(name)
        fleet.engines[name].num_unfinished = 1
    fleet.now += 100
    third = await fleet.loading("c")
    assert fleet.models["a"].is_draining
    return fleet, third


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(loaded_models, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(loaded_models, "weigh", lambda *_, **__: 0)


def run(test):
    asyncio.run(asyncio.wait_for(test, PATIENCE))


def test_model_is_loaded_by_its_first_request_and_stays():
    async def test():
        fleet = Fleet()
        assert not fleet.loaded
        services = [await fleet.use(name) for name in "abab"]
        assert services[0] is services[2]
        assert fleet.events == ["load a", "load b"]
        assert fleet.loaded == {"a", "b"}

    run(test())


def test_requests_that_come_while_a_model_is_loaded_share_the_load():
    async def test():
        fleet = Fleet()
        fleet.engines["a"].gate.clear()
        waiting = [await fleet.loading("a") for _ in range(5)]
        waiting[0].cancel()  # its client has gone
        fleet.engines["a"].gate.set()
        assert len({await task for task in waiting[1:]}) == 1
        assert fleet.events == ["load a"]

    run(test())


def test_least_recently_used_idle_model_makes_room():
    async def test():
        fleet = Fleet("abcd", 35)
        for name in "abca":
            await fleet.use(name)
        fleet.now += 100
        await fleet.use("d")
        assert fleet.events[3:] == ["unload b", "load d"]
        assert fleet.loaded == {"a", "c", "d"}
        assert fleet.engines["d"].max_bytes == 15 * MB

    run(test())


def test_model_with_requests_is_drained_and_never_unloaded_before():
    async def test():
        fleet, third = await wait_for_room()
        assert fleet.registry.loaded.use(fleet.models["a"]) is None, "it gets no further requests"
        assert fleet.registry.loaded.use(fleet.models["b"]) is not None
        again = await fleet.loading("a")  # waits for its turn, after c
        assert fleet.loaded == {"a", "b"}
        fleet.engines["a"].num_unfinished = 0
        await third
        fleet.engines["b"].num_unfinished = 0
        fleet.now += 100
        await again
        assert fleet.events[2:] == ["unload a", "load c", "unload b", "load a"]

    run(test())


def test_two_wanted_models_do_not_thrash():
    """In a memory for one, each stays for a while, and requests for the other one are collected."""

    async def test():
        fleet = Fleet("ab", 15)
        await fleet.use("a")
        for _ in range(10):
            first = [await fleet.loading("b") for _ in range(3)]
            for _ in range(5):
                await fleet.use("a")
                fleet.now -= 1
            assert not any(task.done() for task in first)
            fleet.now += MIN_STAY
            await asyncio.gather(*first)
            second = [await fleet.loading("a") for _ in range(3)]
            fleet.now += MIN_STAY
            await asyncio.gather(*second)
        assert len(fleet.events) == 1 + 10 * 4

    run(test())


def test_pinned_model_stays_and_the_error_has_both_sizes():
    async def test():
        fleet = Fleet(a={"pinned": True}, max_megabytes=15)
        await fleet.use("a")
        fleet.now += 100
        with pytest.raises(EngineError, match=r"needs 10.0 MB of memory, but only 5.0 MB can"):
            await fleet.use("b")
        assert fleet.loaded == {"a"}

    run(test())


def test_idle_model_is_unloaded_after_its_keep_alive():
    async def test():
        fleet = Fleet(a={"keep_alive": 10.0})
        await fleet.use("a")
        await fleet.use("b")
        fleet.now += 8
        fleet.registry.loaded.unload_expired()
        await fleet.turns()
        assert fleet.loaded == {"a", "b"}
        fleet.engines["a"].num_unfinished = 1
        fleet.now += 60
        fleet.registry.loaded.unload_expired()
        await fleet.turns()
        fleet.engines["a"].num_unfinished = 0
        fleet.registry.loaded.unload_expired()
        await fleet.turns()
        assert fleet.loaded == {"a", "b"}, "its time begins when its last request has ended"
        fleet.now += 10 + loaded_models.GRACE_SECONDS
        fleet.registry.loaded.unload_expired()
        await fleet.turns()
        assert fleet.loaded == {"b"}
        await fleet.use("a")
        assert fleet.events == ["load a", "load b", "unload a", "load a"]

    run(test())


def test_failed_load_is_reported_and_tried_again_later():
    async def test():
        fleet = Fleet()
        fleet.engines["a"].error = StartupError("/secret/a.gguf is damaged")
        for _ in range(3):
            with pytest.raises(LoadFailed, match="The model 'a' cannot be loaded"):
                await fleet.use("a")
        assert fleet.events == ["load a"]
        assert not fleet.loaded
        fleet.engines["a"].error = None
        fleet.now += loaded_models.RETRY_SECONDS
        await fleet.use("a")
        assert fleet.loaded == {"a"}

    run(test())


def test_request_for_an_unloaded_engine_loads_it():
    """It has got the service before the model was unloaded."""

    async def test():
        fleet = Fleet()
        await fleet.use("a")
        await fleet.registry.loaded.unload(fleet.models["a"])
        assert not fleet.loaded
        fleet.engines["a"].on_wanted()
        await fleet.turns()
        assert fleet.loaded == {"a"}

    run(test())


def test_closing_ends_loads_and_engines():
    async def test():
        fleet = Fleet()
        await fleet.use("a")
        fleet.engines["b"].gate.clear()
        waiting = await fleet.loading("b")
        await fleet.registry.close()
        with pytest.raises(EngineError, match="shutting down"):
            await waiting
        assert fleet.events[-2:] == ["close a", "close b"]
        assert not fleet.registry.ready

    run(test())


def test_server_is_ready_once_what_is_preloaded_has_been_loaded():
    async def test():
        fleet = Fleet(a={"preload": True})
        assert not fleet.registry.ready
        await fleet.use("b")
        assert not fleet.registry.ready
        await fleet.use("a")
        assert fleet.registry.ready
        fleet.engines["a"].ready = False  # it is being restarted, the other one works
        assert fleet.registry.ready
        fleet.engines["b"].ready = False
        assert not fleet.registry.ready
        assert Fleet().registry.ready, "models are loaded when they are wanted"

    run(test())


def test_trace_of_zipf_requests_loads_hardly_more_than_lru():
    """Three models in a memory for two, one request at a time; the target is 1.2."""
    chance = random.Random(1)
    trace = chance.choices("abc", [6, 3, 2], k=2000)
    lru, expected = [], 0
    for name in trace:
        if name not in lru:
            expected += 1
            lru = lru[-1:]
        else:
            lru.remove(name)
        lru.append(name)

    async def test():
        fleet = Fleet()
        for name in trace:
            await asyncio.gather(fleet.use(name), fleet.pass_time(10.0))
        loads = sum(event.startswith("load") for event in fleet.events)
        assert loads <= 1.2 * expected

    run(test())


def test_model_that_was_to_leave_stays_if_another_one_left_before_it():
    async def test():
        fleet, third = await wait_for_room()
        fleet.engines["b"].num_unfinished = 0
        await third
        assert not fleet.models["a"].is_draining
        assert await fleet.use("a")
        assert fleet.events == ["load a", "load b", "unload b", "load c"]

    run(test())


@pytest.mark.parametrize("how", ["keep_alive", "unload"])
def test_model_that_waits_for_its_own_requests_does_not_delay_others(how):
    async def test():
        fleet = Fleet()
        await fleet.use("a")
        fleet.engines["a"].num_unfinished = 1
        if how == "unload":
            leaving = asyncio.create_task(fleet.registry.loaded.unload(fleet.models["a"]))
        else:
            fleet.registry.loaded.keep(fleet.models["a"], 0.0)
            leaving = asyncio.create_task(asyncio.sleep(0))
            fleet.now += 100
            fleet.registry.loaded.unload_expired()
        await fleet.turns()
        await fleet.use("b")
        assert fleet.loaded == {"a", "b"}
        again = await fleet.loading("a")
        fleet.engines["a"].num_unfinished = 0
        await asyncio.gather(again, leaving)
        expected = ["unload a", "load a"] if how == "unload" else []
        assert fleet.events[2:] == expected

    run(test())


def test_expired_model_that_gets_a_request_while_another_one_leaves_stays():
    async def test():
        fleet = Fleet(a={"keep_alive": 1.0}, b={"keep_alive": 1.0})
        await fleet.use("a")
        await fleet.use("b")
        fleet.now += 100
        fleet.registry.loaded.unload_expired()  # begins to unload both
        await fleet.use("b")
        await fleet.turns()
        assert fleet.loaded == {"b"}
        assert "unload b" not in fleet.events

    run(test())


@pytest.mark.parametrize("error", [StartupError("damaged"), OSError("cannot fork")])
def test_requests_that_wait_for_an_engine_end_if_it_cannot_be_started(error):
    async def test():
        fleet = Fleet()
        await fleet.use("a")
        await fleet.registry.loaded.unload(fleet.models["a"])
        fleet.engines["a"].error = error
        fleet.engines["a"].on_wanted()
        await fleet.turns()
        assert isinstance(fleet.engines["a"].ended_with, LoadFailed)
        assert fleet.events.count("load a") == 2

    run(test())


def test_requests_that_wait_for_an_engine_end_if_there_is_no_memory():
    async def test():
        fleet = Fleet("ab", 15, b={"pinned": True})
        await fleet.use("a")
        await fleet.registry.loaded.unload(fleet.models["a"])
        await fleet.use("b")
        fleet.engines["a"].on_wanted()
        await fleet.turns()
        assert "10.0 MB" in str(fleet.engines["a"].ended_with)

    run(test())


def test_engine_that_is_killed_while_it_loads_is_started_again():
    async def test():
        fleet = Fleet()
        engine, starts = fleet.engines["a"], []

        async def start(max_bytes):
            starts.append(max_bytes)
            if len(starts) <= loaded_models.MAX_KILLS:
                raise KilledWhileLoading("SIGKILL")
            await StubEngine.start(engine, max_bytes)

        engine.start = start
        await fleet.use("a")
        assert len(starts) == 1 + loaded_models.MAX_KILLS

    run(test())


def test_models_made_from_others_take_no_memory_and_leave_with_them():
    async def test():
        fleet = Fleet("ab", 15)
        child = ServedModel(name="child", parent=fleet.models["a"])
        fleet.registry.add(child)
        derived = await fleet.registry.load(child)
        assert derived is await fleet.registry.load(child)
        assert derived.model_name == "child"
        fleet.now += 100
        await fleet.use("b")
        assert not child.is_loaded
        fleet.now += 100
        await fleet.registry.load(child)
        assert fleet.events == ["load a", "unload a", "load b", "unload b", "load a"]
        fleet.registry.remove("a")
        assert [model.name for model in fleet.registry.models] == ["b"]
        with pytest.raises(UnknownModel):
            fleet.registry.find("child")

    run(test())


def test_shutdown_does_not_wait_for_loads():
    async def test():
        fleet = Fleet()
        fleet.engines["a"].gate.clear()
        waiting = await fleet.loading("a")
        fleet.registry.loaded.drain()
        with pytest.raises(EngineError, match="shutting down"):
            await waiting

    run(test())


def test_removed_model_ends_after_its_requests():
    async def test():
        fleet = Fleet()
        await fleet.use("a")
        fleet.engines["a"].num_unfinished = 1
        ending = asyncio.create_task(fleet.registry.discard(fleet.models["a"]))
        await fleet.turns()
        assert "close a" not in fleet.events
        with pytest.raises(UnknownModel):
            fleet.registry.find("a")
        fleet.engines["a"].num_unfinished = 0
        await ending
        assert fleet.events == ["load a", "unload a", "close a"]
        with pytest.raises(UnknownModel):
            await fleet.registry.load(fleet.models["a"])

    run(test())


def test_folder_is_scanned_for_new_moved_and_missing_files(caplog):
    def found(**paths):
        own = ServedModel(name="own")
        return [own] + [
            ServedModel(name=name, path=path, recipe=path, is_found=True)
            for name, path in paths.items()
        ]

    async def test():
        scans = [found(a="1", b="1"), found(a="2"), StartupError("no folder"), found(a="2", c="1")]

        def scan(reads_settings):
            assert not reads_settings
            result = scans.pop(0)
            if isinstance(result, Exception):
                raise result
            return result

        registry = Registry([ServedModel(name="own")], scan=scan)
        for expected in ({"a": "1", "b": "1"}, {"a": "2"}, {"a": "2"}, {"a": "2", "c": "1"}):
            await registry.rescan()
            assert {model.name: model.path for model in registry.models[1:]} == expected
        await registry.rescan(min_age=1000)
        assert not scans

    run(test())
    assert "the folder of models cannot be read: no folder" in caplog.text


def reloadable(fleet, **recipes):
    """Let the settings of ``fleet`` be these models with these recipes, in a new engine each."""

    def scan(reads_settings):
        assert reads_settings
        models = []
        for name, recipe in recipes.items():
            engine = StubEngine(10 * MB, fleet.events, f"{name}{recipe}")
            engine.error = fleet.errors.get(name)
            model = ServedModel(name=name, recipe=recipe, aliases=[f"{name}-alias"])

            async def open_(model, engine=engine):
                model.min_bytes = 10 * MB
                return stub_service(engine)

            model.open = open_
            models.append(model)
        return models

    fleet.registry._scan = scan
    for model in fleet.models.values():
        model.recipe = 1


def test_reloaded_settings_add_remove_and_replace_models(monkeypatch):
    """A loaded model with other settings is loaded beside the old one, which ends after its
    requests; one with the same settings stays, and gets new aliases.
    """
    monkeypatch.setattr("cllm.serving.loaded_models.REPLACED_SECONDS", 0.0)

    async def test():
        fleet = Fleet(max_megabytes=100)
        reloadable(fleet, b=1, a=2, d=1)
        for name in "ab":
            await fleet.use(name)
        fleet.engines["a"].num_unfinished = 1
        kept = fleet.registry.find("b")
        await fleet.registry.reload()
        assert [model.name for model in fleet.registry.models] == ["b", "a", "d"]
        assert fleet.registry.find("b-alias") is kept
        with pytest.raises(UnknownModel):
            fleet.registry.find("c")
        new = fleet.registry.find("a")
        assert new.is_loaded
        assert (await fleet.registry.load(new)).model_name == "a2"
        await fleet.turns()
        assert fleet.events == ["load a", "load b", "load a2"]
        fleet.engines["a"].num_unfinished = 0
        await fleet.turns()
        await fleet.turns()
        assert fleet.events[3:] == ["unload a", "close a"]

    run(test())


def test_model_that_cannot_be_loaded_again_stays(caplog):
    async def test():
        fleet = Fleet(max_megabytes=100)
        reloadable(fleet, a=2)
        fleet.errors["a"] = StartupError("damaged")
        await fleet.use("a")
        await fleet.registry.reload()
        assert fleet.registry.find("a") is fleet.models["a"]
        assert fleet.models["a"].is_loaded
        assert fleet.events == ["load a", "load a2", "close a2"]

    run(test())
    assert "the model a stays as it was: damaged" in caplog.text


def test_settings_with_a_fault_change_nothing():
    async def test():
        fleet = Fleet()

        def scan(reads_settings):
            raise StartupError("line 3: nonsense")

        fleet.registry._scan = scan
        with pytest.raises(StartupError, match="line 3"):
            await fleet.registry.reload()
        assert [model.name for model in fleet.registry.models] == ["a", "b", "c"]

    run(test())


def test_reload_loads_what_is_to_be_preloaded_and_stays_ready():
    async def test():
        fleet = Fleet(max_megabytes=100)
        await fleet.use("a")
        assert fleet.registry.ready
        reloadable(fleet, a=1, d=1)
        scan = fleet.registry._scan

        def preloading(reads_settings):
            models = scan(reads_settings)
            models[1].preload = True
            return models

        fleet.registry._scan = preloading
        await fleet.registry.reload()
        assert fleet.registry.ready
        await fleet.turns()
        assert fleet.registry.find("d").is_loaded
        assert fleet.registry.ready

    run(test())


def test_requests_wait_for_the_successor_of_a_model_that_had_to_leave():
    """There is room for one. Neither is the old one loaded again, nor does a request fail."""

    async def test():
        fleet = Fleet(names="a", max_megabytes=15)
        reloadable(fleet, a=2)
        await fleet.use("a")
        old = fleet.models["a"]
        fleet.now += 100
        reloading = asyncio.create_task(fleet.registry.reload())
        await fleet.turns()
        service = await fleet.registry.load(old)
        assert service.model_name == "a2"
        assert await reloading == []
        await fleet.turns()
        assert [event for event in fleet.events if "load" in event] == [
            "load a",
            "unload a",
            "load a2",
        ]

    run(test())


def test_adapter_of_a_model_that_could_not_be_replaced_is_not_served(caplog):
    async def test():
        fleet = Fleet(names="a", max_megabytes=100)
        reloadable(fleet, a=2)
        fleet.errors["a"] = StartupError("no such adapter")
        scan = fleet.registry._scan

        def with_adapter(reads_settings):
            models = scan(reads_settings)
            return [
                *models,
                ServedModel(name="poet", parent=models[0], adapter_file=AdapterFile("1")),
            ]

        fleet.registry._scan = with_adapter
        await fleet.use("a")
        faults = await fleet.registry.reload()
        assert faults == ["the model a stays as it was: no such adapter"]
        assert [model.name for model in fleet.registry.models] == ["a"]

    run(test())
    assert "the adapter poet is not served" in caplog.text
