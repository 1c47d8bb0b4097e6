#!/usr/bin/env python3
"""How two checkpoints differ, whatever layouts or formats wrote them. Exit code 1 if they do.

The code is in megatron/tools/checkpoint/diff.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.diff import main

if __name__ == "__main__":
    main()
