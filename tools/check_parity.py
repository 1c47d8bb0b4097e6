#!/usr/bin/env python3
"""Does this layout compute what one rank computes? The config made small, trained both ways on CPU ranks in fp64, and compared.

The code is in megatron/tools/check_parity.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.check_parity import main

if __name__ == "__main__":
    main()
