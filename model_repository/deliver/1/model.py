# SPDX-License-Identifier: Apache-2.0
"""deliver passes responses on in order and sees that a client is gone: the code is cedar.triton.deliver."""

from cedar.triton.deliver import Deliver as TritonPythonModel

__all__ = ["TritonPythonModel"]
