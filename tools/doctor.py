#!/usr/bin/env python3
"""Examine the machines of a run before it is started: software, devices, kernels, links, clocks, limits, data and disks.

The code is in megatron/tools/doctor.py; `--help` says how to use it.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tools.doctor import main

if __name__ == "__main__":
    main()
