#!/usr/bin/env python3
"""Check the flags of a run before it is started: whether it would start, which rules they break, and the fewest changes that keep all.

The code is in megatron/tools/check_config.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.check_config import main

if __name__ == "__main__":
    main()
