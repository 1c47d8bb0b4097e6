#!/usr/bin/env python3
"""Join .bin/.idx pairs into one, in order: all of a folder by their names, or those given.

The code is in megatron/tools/merge_datasets.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.merge_datasets import main

if __name__ == "__main__":
    main()
