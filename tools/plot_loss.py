#!/usr/bin/env python3
"""Loss curves of a run, as a picture: the JSONL log of --log-jsonl in, a PNG out.

The code is in megatron/tools/plot_loss.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.plot_loss import main

if __name__ == "__main__":
    main()
