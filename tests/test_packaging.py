"""The container image and the systemd unit, as far as they can be checked without running them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from cllm.cli.main import app
from cllm.config.settings import OPTIONS
from cllm.config.sources import VARIABLES
from tools import build_wheels

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PORT = OPTIONS["server.port"].default
SECRET = re.compile(r"(api_?key|token|password|secret)\s*[=:]\s*[\"']?\w", re.IGNORECASE)
NAMES_A_FILE = re.compile(r"(HF_TOKEN_PATH|file)\s*[=:]")


def test_minor_version_of_uvicorn_is_fixed() -> None:
    """cllm.server.http builds on parts of uvicorn that may change in every minor version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (uvicorn,) = (
        requirement
        for requirement in map(Requirement, project["dependencies"])
        if requirement.name == "uvicorn"
    )
    version = Version(metadata.version("uvicorn"))
    assert version in uvicorn.specifier
    assert f"{version.major}.{version.minor + 1}.0" not in uvicorn.specifier


@pytest.mark.llama
def test_requirements_of_llama_cpp_python_are_those_of_the_package() -> None:
    """uv takes them from pyproject.toml, and ignores them there if the version is another one."""
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    (package,) = uv["dependency-metadata"]
    assert package["version"] == metadata.version(package["name"])
    without_extras = [
        requirement
        for requirement in map(Requirement, metadata.requires(package["name"]) or [])
        if requirement.marker is None
    ]
    assert set(map(Requirement, package["requires-dist"])) == set(without_extras)


def read_dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    text = (ROOT / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(word, text) for word, text in parts]


def instructions(name: str) -> list[str]:
    """Return the arguments of one instruction in the last stage."""
    last = max(at for at, (word, _) in enumerate(read_dockerfile()) if word == "FROM")
    return [text for word, text in read_dockerfile()[last:] if word == name]


@pytest.fixture(scope="module")
def service() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["cllm"]


def test_image_runs_cllm_as_an_unprivileged_user() -> None:
    user, group = instructions("USER")[-1].split(":")
    assert int(user) > 0
    assert int(group) > 0
    assert instructions("ENTRYPOINT") == ['["cllm"]']
    assert instructions("CMD") == ['["serve"]']


def test_image_checks_its_health_at_the_port_that_it_exposes() -> None:
    (check,) = instructions("HEALTHCHECK")
    assert f"http://127.0.0.1:{PORT}/health" in check
    assert instructions("EXPOSE") == [str(PORT)]


def test_health_check_fails_without_a_server(tmp_path) -> None:
    """Its own program is run, at a port where nothing listens."""
    (check,) = instructions("HEALTHCHECK")
    command = yaml.safe_load(check.partition("CMD")[2])
    command[-1] = command[-1].replace(f":{PORT}/", ":9/")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_image_writes_only_below_its_volume() -> None:
    (environment,) = (text for text in instructions("ENV") if "HOME" in text)
    (volume,) = instructions("VOLUME")
    assert f"HOME={volume}" in shlex.split(environment)


def test_image_has_no_key_and_so_serves_others_only_with_one() -> None:
    """The server itself refuses to start without keys, see docs/access.md."""
    words = " ".join(text for _, text in read_dockerfile())
    assert "CLLM_SERVER_HOST=0.0.0.0" in words
    assert "insecure" not in words.lower()


def test_gpus_of_the_image_are_those_of_the_wheels() -> None:
    comment = (ROOT / "Dockerfile").read_text().partition("# GPU: ")[2].splitlines()[0]
    assert all(gpu in comment for gpu in build_wheels.GPUS)


def test_dependencies_of_the_image_are_locked_except_the_companion_wheel() -> None:
    text = " ".join(text for _, text in read_dockerfile())
    assert "uv export --frozen" in text
    assert "--no-emit-package llama-cpp-python" in text
    assert "--require-hashes" in text


def test_only_what_the_wheels_are_made_from_gets_into_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    allowed = {line.removeprefix("!") for line in rules if line.startswith("!")}
    assert allowed == {
        *("LICENSE", "README.md", "native", "pyproject.toml", "src", "tools", "uv.lock")
    }
    assert all((ROOT / name).exists() for name in allowed)


@pytest.mark.parametrize(
    "file",
    [
        *("Dockerfile", "compose.yaml", "packaging/systemd/cllm.service"),
        *("packaging/cluster/compose.yaml", "packaging/helm/cllm/values.yaml"),
    ],
)
def test_no_secret_is_written_down(file) -> None:
    text = (ROOT / file).read_text()
    found = [line for line in text.splitlines() if SECRET.search(line)]
    assert [line for line in found if not NAMES_A_FILE.search(line)] == []


def test_compose_gives_the_service_no_more_than_it_needs(service) -> None:
    assert service["image"] == f"cllm:{VERSION}"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ports"] == [f"127.0.0.1:{PORT}:{PORT}"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert [mount.split(":")[0] for mount in service["tmpfs"]] == ["/tmp"]


def read_cluster() -> dict:
    """Return the services of the cluster's compose file. YAML merges what they share."""
    return yaml.safe_load((ROOT / "packaging/cluster/compose.yaml").read_text())["services"]


def test_compose_gives_a_cluster_no_more_than_it_needs(service) -> None:
    (volume,) = instructions("VOLUME")
    services = read_cluster()
    for name, one in services.items():
        for key in ("image", "read_only", "cap_drop", "security_opt", "pids_limit", "tmpfs"):
            assert one[key] == service[key]
        assert one["volumes"] == [f"{name}:{volume}"], "each has its own storage folder"
        assert one["environment"]["CLLM_CLUSTER_KEY"].startswith("${CLLM_CLUSTER_KEY:?")
    assert [name for name, one in services.items() if "ports" in one] == ["front"]
    assert services["front"]["ports"] == service["ports"]


def test_front_of_compose_names_all_replicas() -> None:
    front, *replicas = read_cluster()
    command = read_cluster()[front]["command"]
    assert command[-1] == ",".join(f"http://{name}:{PORT}" for name in replicas)
    app.parse_args(command)


def run_tool(*command: str, **more: Any) -> str:
    """Return what a program prints, which must succeed; skip if it is not installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    done = subprocess.run(command, capture_output=True, text=True, check=False, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("file", ["compose.yaml", "packaging/cluster/compose.yaml"])
def test_docker_accepts_the_compose_file(file) -> None:
    probe = f"{shutil.which('docker') or 'false'} compose version"
    if subprocess.run(probe.split(), capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    own = {"CLLM_CLUSTER_KEY": "x"}
    run_tool("docker", "compose", "--file", str(ROOT / file), "config", env=os.environ | own)


CHART = ROOT / "packaging/helm/cllm"


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION


def test_helm_and_kubernetes_accept_the_chart(tmp_path) -> None:
    """The objects are validated against the schemas of Kubernetes, and settings against ours."""
    run_tool("helm", "lint", "--strict", str(CHART))
    values = ["--set", "replicas.count=2", "--set", "model=hf:a/b"]
    text = run_tool("helm", "template", "test", str(CHART), *values)
    objects = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}
    for _, pods in sorted(objects.items()):
        if pods["kind"] != "StatefulSet":
            continue
        template = pods["spec"]["template"]["spec"]
        (container,) = template["containers"]
        app.parse_args(container["args"])
        names = {one["name"] for one in container["env"]}
        assert names <= VARIABLES.keys()
        assert template["securityContext"]["runAsNonRoot"] is True
    front = objects["StatefulSet", "test-front"]["spec"]["template"]["spec"]["containers"][0]
    urls = [f"http://test-replica-{number}.test-replica:{PORT}" for number in range(2)]
    assert front["args"][-1] == ",".join(urls)
    if kubeconform := shutil.which("kubeconform"):
        run_tool(kubeconform, "-strict", "-summary", input=text)


def test_compose_keeps_the_volume_of_the_image(service) -> None:
    (volume,) = instructions("VOLUME")
    name, target = service["volumes"][0].split(":")
    assert target == volume
    assert name in yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"]


def read_unit() -> dict[str, list[str]]:
    """Return the values of each key of the unit, without comments."""
    values: dict[str, list[str]] = {}
    for line in (ROOT / "packaging" / "systemd" / "cllm.service").read_text().splitlines():
        key, found, value = line.partition("=")
        if found and not key.startswith("#"):
            values.setdefault(key, []).append(value)
    return values


def test_unit_runs_as_a_user_of_its_own_without_rights() -> None:
    unit = read_unit()
    assert unit["DynamicUser"] == ["yes"]
    assert unit["ProtectSystem"] == ["strict"]
    assert unit["NoNewPrivileges"] == ["yes"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["StateDirectory"] == ["cllm"]
    assert "HOME=%S/cllm" in unit["Environment"]
    assert not any("HOST=" in value for value in unit["Environment"]), "loopback by default"


@pytest.mark.slow
def test_systemd_accepts_the_unit(tmp_path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "cllm.service"
    text = (ROOT / "packaging" / "systemd" / "cllm.service").read_text()
    unit.write_text(text.replace("/opt/cllm/bin/cllm", shutil.which("true")))
    command = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
