#!/usr/bin/env python3
"""What is in .bin/.idx pairs: counts, lengths, the first documents as text; and whether the files are whole.

The code is in megatron/tools/inspect_dataset.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.inspect_dataset import main

if __name__ == "__main__":
    main()
