# SPDX-License-Identifier: Apache-2.0
"""What every measurement shares: order statistics, token streams as timings, and the facts that make a result repeatable."""
