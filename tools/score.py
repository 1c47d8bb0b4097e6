#!/usr/bin/env python3
"""Score texts with a reward model: JSON lines in, the same lines with their scores out.

The code is in megatron/tools/score.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.score import main

if __name__ == "__main__":
    main()
