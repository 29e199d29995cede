# SPDX-License-Identifier: Apache-2.0
"""From our values to the server's response objects. The one module besides the steps that imports the stub's library."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from cedar.errors import CedarError, ErrorCode
from cedar.triton.tensors import NUMPY, Tensor

log = logging.getLogger("cedar.triton")
Arrays = Mapping[str, NDArray[Any]]


def array(tensor: Tensor, value: object) -> NDArray[Any]:
    """``value`` (one element, or all of a vector) with the tensor's type; text becomes UTF-8."""
    if isinstance(value, str):
        value = value.encode()
    if tensor.dims == (-1,):
        return np.asarray(value, dtype=NUMPY[tensor.dtype])
    result = np.empty(1, dtype=NUMPY[tensor.dtype])
    result[0] = value
    return result


def response(tensors: Iterable[Tensor], values: Mapping[str, object]) -> Any:
    """A response that carries every tensor of the step: an absent one would end the ensemble in an error."""
    return pb_utils.InferenceResponse([pb_utils.Tensor(t.name, array(t, values[t.name])) for t in tensors])


def failure(error: CedarError) -> Any:
    """A response that is an error; its message begins with our code word."""
    # looked up here: while the server completes a configuration it imports models without these names
    codes = {
        ErrorCode.INVALID_ARGUMENT: pb_utils.TritonError.INVALID_ARG,
        ErrorCode.UNAVAILABLE: pb_utils.TritonError.UNAVAILABLE,
        ErrorCode.INTERNAL: pb_utils.TritonError.INTERNAL,
        # Triton has no code for a deadline
        ErrorCode.DEADLINE_EXCEEDED: pb_utils.TritonError.CANCELLED,
    }
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), codes[error.code]))


def internal(key: str, doing: str) -> CedarError:
    """INTERNAL for the exception being handled; the log has the rest under the request's key."""
    log.exception("request %s: failed while %s", key, doing)
    return CedarError(ErrorCode.INTERNAL, f"request {key} failed while {doing}; the log has more under this key")


def send(sender: Any, message: Any, final: bool = True) -> None:
    """Send a response (None: only the final flag). A request that the server has ended already is no error of ours."""
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    try:
        if message is None:
            sender.send(flags=flags)
        else:
            sender.send(message, flags=flags)
    except Exception as error:  # the stub raises its own exception type, also for a request that is gone
        log.warning("a response could not be sent: %s", error)


def inputs(request: Any) -> dict[str, NDArray[Any]]:
    """The inputs that a request carries, by name."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
