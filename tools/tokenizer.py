#!/usr/bin/env python3
"""Train, check and try tokenizers.

The code is in megatron/tools/tokenizer.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.tokenizer import main

if __name__ == "__main__":
    sys.exit(main())
