#!/usr/bin/env python3
"""Texts to vectors: one row of a .npy file for each, in their order, by a BERT of any layout and format.

The code is in megatron/tools/bert_embedding.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.bert_embedding import main

if __name__ == "__main__":
    main()
