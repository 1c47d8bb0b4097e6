#!/usr/bin/env python3
"""Show what a layout means before anything runs: ranks, stages, parameters and bytes a rank, and the schedule.

The code is in megatron/tools/show_layout.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.show_layout import main

if __name__ == "__main__":
    main()
