"""docs/public_api.md promises what there is, and leaves out nothing that users can see."""

import re
from pathlib import Path
from typing import Any

import cllm
from cllm.cli.main import COMMANDS
from cllm.cluster.leases import Replicas
from cllm.cluster.metrics import FrontMetrics
from cllm.config.settings import Settings
from cllm.core.output import Stats
from cllm.core.params import SamplingParams
from cllm.environment import MemoryUse
from cllm.observe.collectors import EngineFigures
from cllm.observe.exposition import render
from cllm.observe.machine import GpuUse, MachineUse
from cllm.observe.metrics import Metrics
from cllm.observe.server_metrics import ServerMetrics
from cllm.observe.step_histograms import StepHistograms
from cllm.routing.router import Router
from cllm.server.app import routes
from cllm.server.cluster.key import ClusterKey

PAGE = (Path(__file__).parents[1] / "docs" / "public_api.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def quoted(section: str) -> list[str]:
    """All code in a section of the page, in its order."""
    return re.findall(r"`([^`\n]+)`", SECTIONS[section])


def test_routes():
    """All that the OpenAPI document has; others are older or other names of these."""
    found = {
        f"{method} {route.path.removesuffix(':path}') + '}' * route.path.endswith(':path}')}"
        for route in routes()
        if route.include_in_schema
        for method in route.methods
    }
    assert sorted(word for word in quoted("HTTP") if " /" in word) == sorted(found)


def test_names_of_the_package():
    listed = SECTIONS["Python"].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == set(cllm.__all__)


def test_methods_of_llm_and_fields_that_are_not_promised():
    words = set(quoted("Python"))
    public = {
        name for kind in (cllm.LLM, cllm.AsyncLLM) for name in dir(kind) if not name.startswith("_")
    }
    assert public <= words
    assert {"grammar_is_loose", "thinking", "dry_breakers"} == words & {
        *SamplingParams.__struct_fields__
    }


def test_commands_and_sections_of_the_configuration():
    words = set(quoted("Commands and configuration"))
    assert {*COMMANDS, *Settings.model_fields} <= words
    named = {word for word in words if re.fullmatch(r"[a-z][a-z_-]*", word)}
    assert named == {
        *COMMANDS,
        *Settings.model_fields,
    }


def test_metrics():
    engines = [EngineFigures(True, 0, Stats(), StepHistograms())] * 2
    current: dict[str, Any] = {"ready": True, "num_restarts": 0, "reservations": {}}
    use = MemoryUse(1, 2)
    machine = MachineUse(use, (GpuUse("GPU 0", 0.5, use),))
    registries = [
        ServerMetrics().update({}, 0, (), machine),
        Metrics("m").update(Stats(), engines=engines, **current),
        FrontMetrics(Replicas([], ClusterKey(Settings()), Router(1), 3.0)).registry,
    ]
    page = render(registries).decode()
    found = re.findall(r"^# TYPE (cllm:\w+) ", page, re.MULTILINE)
    assert set(quoted("Metrics")) == {name for name in found if not name.endswith("_created")}
