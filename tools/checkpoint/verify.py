#!/usr/bin/env python3
"""Read every byte of checkpoints and say everything that is wrong with them. Exit code 1 if anything is.

The code is in megatron/tools/checkpoint/verify.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.verify import main

if __name__ == "__main__":
    main()
