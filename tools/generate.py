#!/usr/bin/env python3
"""Continue every prompt of a file: JSON lines in, JSON lines out, in the same order.

The code is in megatron/tools/generate.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.generate import main

if __name__ == "__main__":
    main()
