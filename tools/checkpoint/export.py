#!/usr/bin/env python3
"""Write the weights of a checkpoint as a Hugging Face folder, with the files of its tokenizer.

The code is in megatron/tools/checkpoint/export.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.checkpoint.export import main

if __name__ == "__main__":
    main()
