# SPDX-License-Identifier: Apache-2.0
"""Step 4: passes responses on, in order, and tells the engine when a client is gone.

Triton marks each child request of a cancelled ensemble as cancelled, so every response that passes here shows whether
anybody still wants it. One instance and the default scheduler keep the order.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from cedar.config.engine import EngineConfig
from cedar.triton import responses
from cedar.triton.link import EngineLink, end_with_server
from cedar.triton.logs import start_logging
from cedar.triton.relay import MetricsRelay
from cedar.triton.tensors import STEPS

OUTPUTS = frozenset(tensor.name for tensor in STEPS[3].outputs)


class Deliver:
    """Decoupled, so that it can swallow what is not for the client."""

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the engine accepts requests."""
        end_with_server()
        config = EngineConfig.load()
        start_logging(config, args["model_name"])
        self._link = EngineLink(config)
        # of all processes of a server this one alone touches its metrics: several at a time crash it
        self._relay = MetricsRelay(self._link.client, pb_utils.MetricFamily)
        self._relay.start()

    def execute(self, requests: list[Any]) -> None:
        """One response of `decoder_generate` each."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                responses.send(sender, self._pass(request))
            except Exception:
                error = responses.internal(request.request_id() or "(no id)", "its response was delivered")
                responses.send(sender, responses.failure(error))

    def _pass(self, request: Any) -> Any:
        """The response for the client, or None."""
        tensors = {tensor.name(): tensor for tensor in request.inputs()}
        if request.is_cancelled():
            self._link.abort(tensors["_sequence_handle"].as_numpy()[0].decode())
        last = bool(tensors["finish_reason"].as_numpy()[0])
        if tensors["_keep_alive"].as_numpy()[0] or not (last or tensors["_stream"].as_numpy()[0]):
            return None
        return pb_utils.InferenceResponse([tensor for name, tensor in tensors.items() if name in OUTPUTS])

    def finalize(self) -> None:
        """The server unloads the model."""
        self._relay.stop()
        self._link.close()
