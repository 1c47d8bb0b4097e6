#!/usr/bin/env python3
"""What is in a checkpoint of any format: names, shapes, dtypes, sizes, who wrote which box, the settings of its run.

The code is in megatron/tools/checkpoint/inspect.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.inspect import main

if __name__ == "__main__":
    main()
