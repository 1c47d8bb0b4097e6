#!/usr/bin/env python3
"""Show what a step of a run saw or will see: documents, boundaries, loss, text; or when a document is seen.

The code is in megatron/tools/explain_data.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.explain_data import main

if __name__ == "__main__":
    main()
