# SPDX-License-Identifier: Apache-2.0
"""Cedar: DeepSeek-V4.1-Flash served from NVIDIA Triton Inference Server."""

__version__ = "0.1.0"
