#!/usr/bin/env python3
"""Combine a language model and an encoder of images into one checkpoint, as a start for pretrain_vlm.py.

The code is in megatron/tools/checkpoint/combine.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.combine import main

if __name__ == "__main__":
    main()
