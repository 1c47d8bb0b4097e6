#!/usr/bin/env python3
"""Compare two runs by their run logs: the first step in which they part, and what they were given that differs.

The code is in megatron/tools/diff_runs.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.diff_runs import main

if __name__ == "__main__":
    main()
