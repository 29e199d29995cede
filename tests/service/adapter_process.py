# SPDX-License-Identifier: Apache-2.0
"""What a Triton step does, as a process: find or start the engine, say which it is, hold a client until stdin ends.

argv: the owner's pid, or "find" to look for tritonserver among the parents; with "generate" it also has a sequence that
does not end; with "wait" it begins when it reads a line. Settings come from CEDAR_*.
"""

from __future__ import annotations

import json
import sys

from service_support import Stream, encode, request

from cedar.config.engine import EngineConfig
from cedar.errors import CedarError
from cedar.service.client import EngineClient
from cedar.service.process import ensure_engine


def main() -> None:
    if "wait" in sys.argv:
        sys.stdin.readline()
    owner = None if sys.argv[1] == "find" else int(sys.argv[1])
    try:
        address = ensure_engine(EngineConfig.load(), owner)
    except CedarError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    client = EngineClient(address)
    if "generate" in sys.argv:
        stream = Stream()
        client.attach(encode(client, request("endless", max_tokens=4000, ignore_eos=True)), stream.on_tokens)
        stream.next()
    print(json.dumps({"address": address, "pid": client.status().pid}), flush=True)
    sys.stdin.read()
    client.close()


main()
