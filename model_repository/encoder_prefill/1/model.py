# SPDX-License-Identifier: Apache-2.0
"""encoder_prefill has the engine encode the prompt: the code is cedar.triton.encoder_prefill."""

from cedar.triton.encoder_prefill import EncoderPrefill as TritonPythonModel

__all__ = ["TritonPythonModel"]
