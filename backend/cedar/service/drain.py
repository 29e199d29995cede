# SPDX-License-Identifier: Apache-2.0
"""``python -m cedar.service.drain``: refuse new requests and wait for the running ones, before a plain tritonserver is stopped.

For a container's preStop hook; `cedar serve` drains by itself.
"""

from __future__ import annotations

import argparse
import sys

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError, invalid, unavailable
from cedar.service.client import EngineClient
from cedar.service.directory import EngineDirectory, runtime_roots
from cedar.service.owner import Owner


def engines() -> dict[int, EngineDirectory]:
    """This user's running engines, by the pid of the tritonserver that each belongs to."""
    found = {}
    for root in runtime_roots():
        for path in root.iterdir() if root.is_dir() else ():
            directory = EngineDirectory(path)
            if directory.engine() is not None:
                found[Owner.parse(path.name).pid] = directory
    return found


def find_address(config: EngineConfig, server: int | None) -> str:
    """The engine that the settings name, else that of tritonserver ``server``, else the only one there is."""
    if config.engine_address:
        return config.engine_address
    found = engines()
    allowed = ", ".join(map(str, sorted(found))) or "none runs"
    if server is None:
        if len(found) > 1:
            raise invalid("--server", "is needed: several servers run", f"the pid of one tritonserver: {allowed}")
        if not found:
            raise unavailable("no engine of this user runs")
        (directory,) = found.values()
    elif server in found:
        directory = found[server]
    else:
        raise invalid("--server", f"{server} is no tritonserver with an engine", allowed)
    return directory.address


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: nothing runs any more; 1: requests were left when the time was up; 2: no answer, or a wrong argument."""
    parser = argparse.ArgumentParser(prog="python -m cedar.service.drain", description=__doc__)
    parser.add_argument("--timeout-ms", type=int, help="longest wait; default: the setting drain_timeout_ms")
    parser.add_argument("--server", type=int, help="pid of the tritonserver, where several run")
    given = parser.parse_args(arguments)
    try:
        config = EngineConfig.load()
        client = EngineClient(find_address(config, given.server))
        try:
            answer = client.drain(config.drain_timeout_ms if given.timeout_ms is None else given.timeout_ms)
        finally:
            client.close()
    except CedarError as error:
        print(f"drain: {error}", file=sys.stderr)
        return 2
    print("drained" if answer.drained else f"{answer.remaining} requests left")
    return 0 if answer.drained else 1


if __name__ == "__main__":
    sys.exit(main())
