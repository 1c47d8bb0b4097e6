#!/usr/bin/env python3
"""Convert a checkpoint: Hugging Face folders, this project's own, and Megatron-LM's, from any to any.

The code is in megatron/tools/checkpoint/convert.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.convert import main

if __name__ == "__main__":
    main()
