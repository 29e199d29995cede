# SPDX-License-Identifier: Apache-2.0
"""Every bad input through the server: an error that names the field, and the next good request is served."""

from __future__ import annotations

import json

import pytest
from cedar_server import Client, Server

from bad_inputs import MAX_PROMPT_BYTES, NAMES, bad_inputs
from cedar.triton.request import Limits


@pytest.fixture(scope="module")
def limits(server: Server) -> Limits:
    """Those of the embedded model."""
    status = server.status()
    image = json.loads((server.model / "config.json").read_text())["image_token_id"]
    return Limits(status.max_model_len, status.vocab_size, image, MAX_PROMPT_BYTES, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_input_harms_the_next_request(client: Client, limits: Limits, name: str) -> None:
    bad = bad_inputs(limits)[name]
    answer = client.run(parameters=bad.parameters, **bad.tensors)
    assert answer.responses == []
    assert ("INVALID_ARGUMENT: " in answer.error) is bad.ours
    for part in bad.says:
        assert part in answer.error
    good = client.run(input_ids=[5], max_tokens=1, temperature=0.0)
    assert (good.error, len(good.ids)) == ("", 1)


def test_refused_requests_hold_memory(server: Server, client: Client, limits: Limits) -> None:
    for bad in list(bad_inputs(limits).values())[:20]:
        client.run(parameters=bad.parameters, **bad.tensors)
    status = server.status()
    assert (status.sequences_held, status.num_waiting, status.num_running) == (0, 0, 0)
