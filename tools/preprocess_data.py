#!/usr/bin/env python3
"""Text to token files: one document per line in, a .bin/.idx pair per key out.

The code is in megatron/tools/preprocess_data.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.preprocess_data import main

if __name__ == "__main__":
    main()
