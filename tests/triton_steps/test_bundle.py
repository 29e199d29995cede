# SPDX-License-Identifier: Apache-2.0
"""Finding a server and preparing its environment."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cedar.config.engine import SHIPPED_REPOSITORY, EngineConfig
from cedar.errors import CedarError
from cedar.triton import bundle, pbtxt
from cedar.triton.bundle import STUB, Triton, find_triton, python_environment
from cedar.triton.server import claim_ports
from cedar.triton.supervisor import check_model, repository_of

CONFIG = EngineConfig()


@pytest.fixture(autouse=True)
def no_other_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PATH and the container's place have none."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(bundle, "CONTAINER", tmp_path / "opt" / "bin" / "tritonserver")


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def backend_of(triton: Triton) -> Path:
    return Path(triton.arguments[0].removeprefix("--backend-directory=")) / "python"


def test_the_order_of_places_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container = executable(bundle.CONTAINER)
    (container.parents[1] / "backends").mkdir()
    assert find_triton(CONFIG).executable == container
    assert find_triton(CONFIG).arguments == (f"--backend-directory={container.parents[1]}/backends",)
    on_path = executable(tmp_path / "bin" / "tritonserver")
    assert find_triton(CONFIG).executable == on_path
    named = executable(tmp_path / "named" / "tritonserver")
    assert find_triton(replace(CONFIG, tritonserver=str(named))).executable == named


def test_the_wheel_s_server_lacks_a_part() -> None:
    triton = find_triton(CONFIG)
    python = backend_of(triton)
    assert {path.name for path in python.iterdir()} >= {"libtriton_python.so", "triton_python_backend_utils.py", STUB, "cedar"}
    assert all(path.exists() for path in python.iterdir())
    assert os.access(python / STUB, os.X_OK)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in os.readlink(python / STUB)
    assert "nvidia_pytriton.libs" in triton.environment["LD_LIBRARY_PATH"]


def test_a_server_named_inside_the_wheel_is_started_without_its_backend() -> None:
    wheel = find_triton(CONFIG)
    assert find_triton(replace(CONFIG, tritonserver=str(wheel.executable))) == wheel


def test_two_processes_that_prepare_at_once_harm_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "cache_directory", lambda: tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(backend_of(find_triton(CONFIG)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [found[0].parent.name]


def test_no_server_or_a_wrong_one_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CedarError, match=r"INVALID_ARGUMENT: tritonserver: /nowhere/tritonserver is not an executable"):
        find_triton(replace(CONFIG, tritonserver="/nowhere/tritonserver"))
    monkeypatch.setattr(bundle.importlib.metadata, "version", lambda _: "2.1.0")
    with pytest.raises(CedarError, match=r"numpy: is 2\.1\.0; allowed: below 2"):
        find_triton(CONFIG)
    monkeypatch.setattr(bundle, "PYTHON_VERSION", "3.99")
    with pytest.raises(CedarError, match=r"python: 3\.99 has no stub"):
        find_triton(CONFIG)
    monkeypatch.setattr(bundle.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(CedarError, match="tritonserver: was not found"):
        find_triton(CONFIG)


def test_a_stub_would_find_another_python_or_none() -> None:
    environment = python_environment()
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert (Path(environment["PYTHONPATH"].split(os.pathsep)[0]) / "cedar" / "__init__.py").is_file()
    assert environment["CEDAR_PYTHON"] == sys.executable


def test_a_child_merges_settings_of_its_own(tmp_path: Path) -> None:
    """A flag that says the default must win over a file and over the environment, also in the children."""
    config = EngineConfig.load({"tick_ms": 250, "fake_quant": True}, {"CEDAR_TICK_MS": "9", "CEDAR_FAKE_QUANT": "false"})
    yaml = tmp_path / "cedar.yaml"
    yaml.write_text("tick_ms: 7\nhost: 1.2.3.4\n")
    again = EngineConfig.load({}, {"CEDAR_TICK_MS": "9", **config.as_env()}, yaml)
    assert again == replace(config, host="127.0.0.1")
    assert (again.tick_ms, again.fake_quant) == (250, True)


def test_a_port_is_not_checked() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CedarError, match=rf"http_port: 127.0.0.1:{port} cannot be bound"):
            claim_ports(replace(CONFIG, http_port=port, grpc_port=0, metrics_port=0))
    with pytest.raises(CedarError, match="allowed: different ports"):
        claim_ports(replace(CONFIG, http_port=8000, grpc_port=8000))
    assert len(set(claim_ports(replace(CONFIG, http_port=0, grpc_port=0, metrics_port=0)))) == 3


def test_a_missing_repository_or_model_is_found_late(tmp_path: Path) -> None:
    with pytest.raises(CedarError, match=r"model_repository: .* has no cedar/config.pbtxt"):
        repository_of(replace(CONFIG, model_repository=str(tmp_path)))
    with pytest.raises(CedarError, match=r"model: .* has no config.json"):
        check_model(replace(CONFIG, model=str(tmp_path)))
    with pytest.raises(CedarError, match="model: is empty although engine_address is set"):
        check_model(replace(CONFIG, engine_address="unix:/e.sock"))
    assert repository_of(CONFIG) == SHIPPED_REPOSITORY


def test_an_installed_wheel_has_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.triton.supervisor.SHIPPED_REPOSITORY", tmp_path / "none")
    monkeypatch.setattr("cedar.triton.supervisor.cache_directory", lambda: tmp_path)
    assert pbtxt.differences(repository_of(CONFIG)) == []


def test_the_cache_is_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/proc")  # nothing can be written there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundle.cache_directory() == tmp_path / "cedar"
    assert not stat.S_IMODE((tmp_path / "cedar").stat().st_mode) & 0o022
