#!/usr/bin/env python3
"""Continue a text with a checkpoint of any layout and format, in one process.

The code is in megatron/tools/generate_text.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.generate_text import main

if __name__ == "__main__":
    main()
