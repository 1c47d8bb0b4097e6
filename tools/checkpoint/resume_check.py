#!/usr/bin/env python3
"""Whether a run that is killed and resumed goes on as if nothing had happened: every piece of its state, bit for bit.

The code is in megatron/tools/checkpoint/resume_check.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.resume_check import main

if __name__ == "__main__":
    main()
