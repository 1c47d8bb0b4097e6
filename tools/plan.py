#!/usr/bin/env python3
"""Plan a run before it is started: memory of every kind of rank, time of a step, whether it fits, and what to change.

The code is in megatron/tools/plan.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.plan import main

if __name__ == "__main__":
    main()
