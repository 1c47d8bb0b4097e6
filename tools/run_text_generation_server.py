#!/usr/bin/env python3
"""Serve a checkpoint over HTTP: a page at /, PUT /api as Megatron's server, /v1 as OpenAI's.

The code is in megatron/tools/run_text_generation_server.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.run_text_generation_server import main

if __name__ == "__main__":
    main()
