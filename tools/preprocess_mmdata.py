#!/usr/bin/env python3
"""Texts and images to a multimodal .bin/.idx pair: a document is a text and an image, with a mode byte for each.

The code is in megatron/tools/preprocess_mmdata.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.preprocess_mmdata import main

if __name__ == "__main__":
    main()
