#!/usr/bin/env python3
"""Repeat a bad step from its failure dump, on the CPU, and say where the first value arises that is not finite.

The code is in megatron/tools/replay.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.replay import main

if __name__ == "__main__":
    sys.exit(main())
