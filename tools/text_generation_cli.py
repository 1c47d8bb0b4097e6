#!/usr/bin/env python3
"""Ask a text generation server, ours or Megatron's, prompt after prompt, until the end of the input (Ctrl-D).

The code is in megatron/tools/text_generation_cli.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.text_generation_cli import main

if __name__ == "__main__":
    main()
