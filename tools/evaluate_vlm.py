#!/usr/bin/env python3
"""Score answers about images by the definition of a benchmark, and write them in its own format.

The code is in megatron/tools/evaluate_vlm.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.evaluate_vlm import main

if __name__ == "__main__":
    main()
