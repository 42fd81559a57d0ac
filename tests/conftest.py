"""Settings of Hypothesis, the built-in model, and an engine to step by hand."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest
from tiny_models import write_tiny_model

from cllm import LLM, Completion, environment
from cllm.backends.base import Logits
from cllm.backends.fake.backend import FakeBackend
from cllm.backends.fake.vocabulary import END
from cllm.core.batch import Batch
from cllm.core.output import TokenOutput
from cllm.core.params import SamplingParams
from cllm.core.request import Priority, Request
from cllm.engine.build import build_engine
from cllm.engine.commands import Abort, Add
from cllm.engine.params import EngineParams
from cllm.models.builtin.questions import Question, held_out_questions
from cllm.models.catalog import BUILTIN

# Set by make test-all: everything is repeated as often as before a release.
IS_FULL = bool(os.environ.get("CLLM_FULL_TESTS"))
# Set by make check, which has two minutes: a third of the repetitions of make test.
IS_QUICK = bool(os.environ.get("CLLM_QUICK_TESTS"))


def repeat(full: int, short: int) -> int:
    """Return how often a test repeats something: ``full`` times in make test-all, ``short`` times in
    make test, and a third of that in make check.
    """
    return full if IS_FULL else -(-short // 3) if IS_QUICK else short


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file whose tests all have a mark that ``-m`` excludes: it may import clients,
    which takes seconds.
    """
    if not re.fullmatch(r"not \w+( and not \w+)*", config.option.markexpr):
        return None
    if not collection_path.match("test_*.py"):
        return None
    excluded = {*re.findall(r"not (\w+)", config.option.markexpr)}
    text = collection_path.read_text(encoding="utf-8")
    marks = re.search(r"^pytestmark = .*", text, re.MULTILINE)
    return True if marks and excluded & {*re.findall(r"mark\.(\w+)", marks[0])} else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures start a server. Skip those marked ``full`` except in make
    test-all, those of dialects with the second backend also, and those marked ``torch`` without
    PyTorch.
    """
    has_torch = find_spec("torch") is not None
    for item in items:
        if any("server" in name for name in getattr(item, "fixturenames", ())):
            item.add_marker("server")
        is_dialect_again = item.get_closest_marker("dialect") and item.get_closest_marker("torch")
        if (item.get_closest_marker("full") or is_dialect_again) and not IS_FULL:
            item.add_marker(pytest.mark.skip(reason="runs in make test-all only"))
        if item.get_closest_marker("torch") and not has_torch:
            item.add_marker(pytest.mark.skip(reason="needs PyTorch, which make torch fetches"))


def pytest_collection_finish() -> None:
    """Make collecting garbage cheap: what exists now remains until the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def garbage() -> Iterator[None]:
    """Report a file that a test leaves open in the module of that test, not in a later one."""
    yield
    gc.collect()


# Slowness of a busy machine is not a failure, so there is no deadline. Hypothesis prints a blob that
# reproduces a failure.
hypothesis.settings.register_profile(
    "cllm",
    deadline=None,
    max_examples=repeat(50, 15),
    stateful_step_count=30,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("cllm")

# The tests start hundreds of Python processes. Without this variable, which images of containers set,
# each one needs half the time to import its modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# On a busy machine, threads that spin while they wait take CPU time from the thread they wait for.
# This must be set before llama.cpp is loaded, here or in a child process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Seconds after which a test stops waiting. This does not measure speed: on a busy machine everything
# takes long.
PATIENCE = 600.0

# A script that runs these tests in the background makes them, and their children, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Paths of a certificate for localhost and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "certificate.pem", folder / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    paths = ["-out", str(files[0]), "-keyout", str(files[1])]
    command = [*words.split(), "-subj", "/CN=localhost", *paths]
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    subprocess.run([*command, "-addext", names], check=True, capture_output=True)
    return files


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the names of the folders that `home` gives to the tests, each one new."""
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a home folder of its own, and return it.

    A server keeps files and usage in the home folder and locks it, so a server that runs beside the
    tests, or one that outlives its test, would change what the others print.
    """
    folder = next(homes)
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))  # what Windows calls it
    return folder


# The built-in model for which expected texts were written. tests/models/test_builtin.py checks it.
BUILTIN_SHA256 = "99e2a1815dd49f37e8c1ee52bcbbe5dcfe8a6a89d7ba54679c1b318a461b03b8"


@pytest.fixture(scope="session")
def builtin_path() -> Path:
    """Return the file of the built-in model; tests that use it are marked ``llama``."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    if not BUILTIN.exists():
        pytest.skip(f"the built-in model is not there: {BUILTIN.name}")
    return BUILTIN


@pytest.fixture(scope="session")
def builtin_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built-in model as a checkpoint in float32; tests that use it are marked
    ``torch``.
    """
    pytest.importorskip("torch", reason="needs the extra torch: tools/setup.sh --torch")
    from checkpoints import convert_model

    return convert_model(BUILTIN, tmp_path_factory.mktemp("checkpoint") / "builtin")


BUILTIN_BACKENDS = ["llama_cpp", pytest.param("torch", marks=pytest.mark.torch)]


@pytest.fixture(scope="session", params=BUILTIN_BACKENDS)
def builtin_model(request: pytest.FixtureRequest) -> str:
    """Return the path of the built-in model as each of BUILTIN_BACKENDS reads it. Tests that use it
    are marked ``llama``.
    """
    name = {"llama_cpp": "builtin_path", "torch": "builtin_checkpoint"}[request.param]
    return str(request.getfixturevalue(name))


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Return ``real_model(name)``: the file of a trained model. CI has fetched it."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

    def find(name: str) -> Path:
        path = Path(__file__).parents[1] / ".tools" / "models" / name
        if not path.exists() and not os.environ.get("CI"):
            pytest.skip(f"{name} is not there: tools/real_models.py fetches it")
        return path

    return find


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return ``tiny_model(kind)``: the file of a model that is not plain attention, see
    tiny_models.py.
    """
    folder = tmp_path_factory.mktemp("tiny")

    def make(kind: str) -> Path:
        path = folder / f"{kind}.gguf"
        if not path.exists():
            write_tiny_model(kind, path)
        return path

    return make


def stop_process(pid: int) -> None:
    """Stop a child process. None of its threads runs any more when this returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def is_right(done: Completion, question: Question) -> bool:
    """Whether ``done`` is the answer of ``question``, which may be a tool call."""
    if not question.answer.startswith("<tool_call>"):
        return done.text == question.answer and not done.tool_calls
    call = json.loads(question.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    called = [(one.name, json.loads(one.arguments)) for one in done.tool_calls]
    return called == [(call["name"], call["arguments"])]


@pytest.fixture(scope="session")
def known_questions(builtin_path: Path) -> Callable[..., list[Question]]:
    """Return ``known_questions(count, seed, kinds)``: held-out questions that the model answers
    correctly when it is alone.

    Whatever else a test does at the same time must not change those answers. The model knows nearly
    all of them.
    """
    llm = LLM(model_max_context_length=1024, scheduler_max_num_seqs=1)
    alone: dict[str, bool] = {}

    def known(question: Question) -> bool:
        key = repr((question.messages, question.tools))
        if key not in alone:
            done = llm.chat(question.messages, SamplingParams(temperature=0), question.tools)
            alone[key] = is_right(done, question)
        return alone[key]

    def choose(count: int, seed: int, kinds: list[str] | None = None) -> list[Question]:
        asked = list(itertools.islice(held_out_questions(seed, kinds), count + 2 + count // 10))
        chosen = list(filter(known, asked))[:count]
        assert len(chosen) == count, f"the model knows only {len(chosen)} of {len(asked)}"
        return chosen

    return choose


class RecordingBackend(FakeBackend):
    """Keeps the batches it was given, and the seq_ids that their rows had then."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.batches: list[Batch] = []
        self.seq_ids: list[list[int]] = []

    def forward(self, batch: Batch) -> Logits:
        self.batches.append(batch)
        self.seq_ids.append([row.seq.seq_id for row in batch.rows])
        return super().forward(batch)


class FakeEngine:
    """An engine on the fake backend, stepped by hand; the laws are checked after every step."""

    def __init__(self, **options) -> None:
        """``options`` are FakeBackend's, and EngineParams' that begin with ``engine_``; by default
        nobody guesses, and prompts are computed in every step.
        """
        mine = {
            name.removeprefix("engine_"): options.pop(name)
            for name in [*options]
            if name.startswith("engine_")
        }
        self.now = 0.0
        self.backend = RecordingBackend(**options, sleep=self.sleep)
        params = EngineParams(**{"check": True, "speculation": "off", "prefill_share": 1.0, **mine})
        self.engine = build_engine(self.backend, params, clock=lambda: self.now)
        self.scheduler = self.engine.scheduler
        self.kv_cache = self.scheduler.sequences.kv_cache
        self.outputs: list[TokenOutput] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def add(
        self,
        name: str,
        prompt: list[int],
        account: str = "",
        priority: Priority = Priority.NORMAL,
        **params,
    ) -> Request:
        """Submit a request; it is greedy unless a temperature is given."""
        limits = {word: params.pop(word, None) for word in ("deadline", "queue_timeout")}
        words = ("cache_salt", "adapters", "num_base_tokens", "boundaries")
        others = {word: params.pop(word) for word in words if word in params}
        sampling = SamplingParams(**{"temperature": 0, **params})
        request = Request(name, prompt, sampling, account, priority, **limits, **others)
        self.engine.handle(Add(request))
        return request

    def abort(self, name: str, index: int | None = None) -> list[TokenOutput]:
        outputs = self.engine.handle(Abort(name, index))
        self.outputs += outputs
        self.scheduler.sequences.check()
        return outputs

    def step(self) -> str:
        """Compute a step and return the rows of its batch as text, "" if there was nothing to do."""
        num_batches = len(self.backend.batches)
        self.outputs += self.engine.step()
        return " | ".join(
            str(batch).replace("   ", " | ") for batch in self.backend.batches[num_batches:]
        )

    def finish(self, max_steps: int = 2000) -> list[str]:
        """Step until there is no work, and return the rows of each step."""
        steps = []
        while self.scheduler.sequences.has_work():
            steps.append(self.step())
            assert len(steps) < max_steps, f"no end in sight: {self.scheduler}"
        return steps

    def tokens(self, name: str, index: int = 0) -> list[int]:
        """Return the tokens that one sequence has got so far."""
        return [
            o.token
            for o in self.outputs
            if (o.request_id, o.index) == (name, index) and o.token >= 0
        ]

    def ends(self) -> dict[str, str]:
        """Return why each sequence ended, by "name.index"."""
        return {f"{o.request_id}.{o.index}": str(o.finish) for o in self.outputs if o.finish}

    def right_tokens(self, request: Request) -> list[int]:
        """Return the fake backend's tokens for a greedy request: it counts up, and ends by itself
        or at a limit.
        """
        limit = self.backend.info.context_length - len(request.prompt)
        limit = min(limit, request.params.max_tokens or limit)
        counted = [(request.prompt[-1] + 1 + i) % 256 for i in range(self.backend._length)]
        return [*counted, END][:limit]


@pytest.fixture(scope="session")
def fake_engine() -> type[FakeEngine]:
    """Return the class FakeEngine, so that a test makes its own with the limits it needs."""
    return FakeEngine


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Return a function that makes control groups: the lines of /proc/self/cgroup, and the files
    of each group by its path.
    """
    monkeypatch.setattr(environment, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(environment, "CGROUPS", tmp_path / "groups")

    def make(own: str, files: dict[str, dict[str, str]]) -> None:
        (tmp_path / "own").write_text(own)
        for path, contents in files.items():
            folder = tmp_path / "groups" / path
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in contents.items():
                (folder / name).write_text(text)

    return make
