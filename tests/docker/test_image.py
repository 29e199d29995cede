# SPDX-License-Identifier: Apache-2.0
"""docker/: what can be known about the image without an engine to build it."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from cedar.config.engine import EngineConfig

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Stage:
    """One FROM and its instructions, in order, as (word, arguments)."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [arguments for each, arguments in self.instructions if each == word]

    def environment(self) -> dict[str, str]:
        return dict(part.split("=", 1) for line in self.all("ENV") for part in shlex.split(line))

    def copies(self) -> list[tuple[list[str], str]]:
        """(sources, target) of each COPY from the build context."""
        out = []
        for line in self.all("COPY"):
            words = shlex.split(line)
            if not any(word.startswith("--from") for word in words):
                plain = [word for word in words if not word.startswith("--")]
                out.append((plain[:-1], plain[-1]))
        return out


def parse_dockerfile(text: str) -> tuple[dict[str, str], list[Stage]]:
    """Build arguments before the first FROM, and the stages."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if not line.strip():
            continue
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base.strip(), name.strip()))
        elif stages:
            stages[-1].instructions.append((word, rest.strip()))
        else:
            assert word == "ARG", f"{word} before FROM"
            key, _, value = rest.partition("=")
            arguments[key] = value
    return arguments, stages


def exec_form(arguments: str) -> list[str]:
    """The JSON list at the end of a CMD or HEALTHCHECK."""
    words = json.loads(arguments[arguments.index("[") :])
    assert all(isinstance(word, str) for word in words)
    return list(words)


def ignored(path: str, patterns: list[str]) -> bool:
    """Whether .dockerignore leaves ``path`` out: the last pattern that matches it or a parent decides."""
    parents = ["/".join(path.split("/")[: n + 1]) for n in range(path.count("/") + 1)]
    result = False
    for pattern in patterns:
        negated, plain = pattern.startswith("!"), pattern.lstrip("!").rstrip("/")
        anywhere = plain.removeprefix("**/")
        for parent in parents:
            name = parent.rsplit("/", 1)[-1] if plain.startswith("**/") else parent
            if fnmatch.fnmatchcase(name, anywhere):
                result = not negated
    return result


ARGUMENTS, STAGES = parse_dockerfile((ROOT / "docker" / "Dockerfile").read_text())
IGNORE = [line for line in (ROOT / ".dockerignore").read_text().split() if not line.startswith("#")]
SETTINGS = {f"CEDAR_{each.name.upper()}" for each in fields(EngineConfig)}
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
SERVICE: dict[str, Any] = COMPOSE["services"]["cedar"]


@pytest.mark.parametrize("source", sorted({source for stage in STAGES for sources, _ in stage.copies() for source in sources}))
def test_copy_of_a_path_that_is_missing_or_ignored(source: str) -> None:
    assert (ROOT / source).exists(), f"COPY {source}: no such path"
    assert not ignored(source, IGNORE), f"COPY {source}: left out by .dockerignore"


def test_context_carries_environment_results_or_generated_code() -> None:
    for path in (".venv/bin/python", ".git/config", "tests/conftest.py", "perf/results/a.json", "backend/cedar/v1/engine_pb2.py"):
        assert ignored(path, IGNORE), path
    assert ignored("backend/cedar/__pycache__/a.pyc", IGNORE)
    assert not ignored("backend/cedar/cli/__init__.py", IGNORE)


def test_base_image_not_pinned_to_a_release() -> None:
    assert re.fullmatch(r"nvcr\.io/nvidia/tritonserver:\d\d\.\d\d-py3", ARGUMENTS["TRITON_IMAGE"])
    assert re.fullmatch(r"nvcr\.io/nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu24\.04", ARGUMENTS["BUILD_IMAGE"])
    assert [stage.base for stage in STAGES] == ["${BUILD_IMAGE}", "${TRITON_IMAGE}"]


def test_builder_that_may_make_a_wheel_without_the_kernel_library() -> None:
    builder = STAGES[0]
    packages = next(line for line in builder.all("RUN") if "apt-get install" in line).split()
    assert {"cmake", "g++", "python3-pip"} <= set(packages)
    assert "test -e /wheels/cedar_serving-*-py3-none-linux_*.whl" in builder.all("RUN")[-1]


def test_image_runs_as_root_or_installs_after_dropping_it() -> None:
    final = STAGES[-1].instructions
    users = [arguments for word, arguments in final if word == "USER"]
    assert users == ["1000:1000"]
    after = [word for word, _ in final[final.index(("USER", "1000:1000")) :]]
    assert not {"RUN", "COPY", "ADD"} & set(after)


def test_pip_installs_unpinned_versions() -> None:
    for stage in STAGES:
        seen_constraint = False
        for word, arguments in stage.instructions:
            seen_constraint |= word == "ENV" and "PIP_CONSTRAINT=" in arguments
            assert word != "RUN" or "-m pip" not in arguments or seen_constraint, arguments
        where = stage.environment()["PIP_CONSTRAINT"]
        assert any(target in where or where.endswith(target) for sources, target in stage.copies() for _ in sources), where


def test_variable_that_nothing_reads() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "backend" / "cedar").rglob("*.py"))
    names = {name for name in STAGES[-1].environment() if name.startswith("CEDAR_")} | set(SERVICE["environment"])
    assert names
    known = SETTINGS | set(re.findall(r'"(CEDAR_[A-Z_]+)"', sources))
    assert names <= known, sorted(names - known)


def test_default_command_that_the_wheel_does_not_install() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    command = exec_form(STAGES[-1].all("CMD")[0])
    assert command == ["cedar", "serve"]
    assert command[0] in scripts
    assert not STAGES[-1].all("ENTRYPOINT"), "the base image's entrypoint is what makes `docker run IMAGE tritonserver …` work"


def test_ports_of_the_image_are_not_the_settings_defaults() -> None:
    defaults = EngineConfig()
    assert STAGES[-1].all("EXPOSE") == [f"{defaults.http_port} {defaults.grpc_port} {defaults.metrics_port}"]


def _image_probe() -> list[str]:
    return list(exec_form(STAGES[-1].all("HEALTHCHECK")[0]))


def _compose_probe() -> list[str]:
    test = SERVICE["healthcheck"]["test"]
    assert test[0] == "CMD"
    return list(test[1:])


@contextmanager
def _readiness(status: int) -> Iterator[tuple[int, list[str]]]:
    """A loopback HTTP server that answers every GET with ``status``; yields its port and the paths asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1], paths
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.mark.parametrize("probe", [_image_probe(), _compose_probe()], ids=["image", "compose"])
@pytest.mark.parametrize(("status", "healthy"), [(200, True), (400, False), (503, False)])
def test_health_probe_wrong_about_readiness(probe: list[str], status: int, healthy: bool) -> None:
    with _readiness(status) as (port, paths):
        command = [sys.executable, *(word.replace("'8000'", f"'{port}'").replace(":8000/", f":{port}/") for word in probe[1:])]
        done = subprocess.run(command, capture_output=True, timeout=30, env={})
    assert probe[0] == "python3"
    assert paths == ["/v2/models/decoder_generate/ready"]
    assert (done.returncode == 0) is healthy


def test_health_probe_follows_a_changed_port() -> None:
    with _readiness(200) as (port, paths):
        done = subprocess.run([sys.executable, *_image_probe()[1:]], timeout=30, env={"CEDAR_HTTP_PORT": str(port)})
    assert done.returncode == 0
    assert len(paths) == 1


def test_compose_publishes_beyond_loopback() -> None:
    assert len(SERVICE["ports"]) == 3
    assert all(port.startswith("127.0.0.1:") for port in SERVICE["ports"])


def test_compose_kills_before_the_drain_ends() -> None:
    grace = int(SERVICE["stop_grace_period"].removesuffix("s"))
    assert grace * 1000 > EngineConfig().drain_timeout_ms


def test_compose_lacks_what_triton_needs_or_grants_more() -> None:
    assert SERVICE["shm_size"] == "1gb"
    assert SERVICE["init"] is True
    assert SERVICE["read_only"] is True
    assert SERVICE["tmpfs"] == ["/tmp"]
    assert SERVICE["cap_drop"] == ["ALL"]
    assert "privileged" not in SERVICE
    build = (ROOT / "docker" / SERVICE["build"]["context"]).resolve()
    assert (build / SERVICE["build"]["dockerfile"]).is_file()


def test_compose_mounts_and_names_the_checkpoint_differently() -> None:
    source, target, mode = re.fullmatch(r"(\$\{.*?\}):(.*):(.*)", SERVICE["volumes"][0]).groups()  # type: ignore[union-attr]
    assert source == "${MODEL:-no-checkpoint}"
    assert "no-checkpoint" in COMPOSE["volumes"]
    assert SERVICE["environment"]["CEDAR_MODEL"] == f"${{MODEL:+{target}}}"
    assert mode == "ro"
