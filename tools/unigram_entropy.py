#!/usr/bin/env python3
"""The entropy of a token file's unigrams, in nats per token: the loss of a model that knows only how common each token is.

The code is in megatron/tools/unigram_entropy.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.unigram_entropy import main

if __name__ == "__main__":
    main()
