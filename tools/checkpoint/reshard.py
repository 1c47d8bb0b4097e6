#!/usr/bin/env python3
"""Rewrite a checkpoint: into another number of files, with weights of another dtype, or the weights alone.

The code is in megatron/tools/checkpoint/reshard.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.reshard import main

if __name__ == "__main__":
    main()
