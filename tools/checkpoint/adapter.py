#!/usr/bin/env python3
"""Adapters as files: exported for PEFT and imported from it, merged into the weights of their base and taken out again.

The code is in megatron/tools/checkpoint/adapter.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.adapter import main

if __name__ == "__main__":
    main()
