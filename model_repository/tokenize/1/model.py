# SPDX-License-Identifier: Apache-2.0
"""tokenize validates a request and makes token ids of it: the code is cedar.triton.tokenize."""

from cedar.triton.tokenize import Tokenize as TritonPythonModel

__all__ = ["TritonPythonModel"]
