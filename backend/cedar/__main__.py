# SPDX-License-Identifier: Apache-2.0
from cedar.cli import main

main()
