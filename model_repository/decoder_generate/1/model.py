# SPDX-License-Identifier: Apache-2.0
"""decoder_generate has the engine generate; detokenises: the code is cedar.triton.decoder_generate."""

from cedar.triton.decoder_generate import DecoderGenerate as TritonPythonModel

__all__ = ["TritonPythonModel"]
