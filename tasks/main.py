#!/usr/bin/env python3
"""Evaluate or finetune: `torchrun --nproc_per_node N tasks/main.py --task NAME <flags>`.

The code is in megatron/tasks/main.py; `--help` lists the flags in groups.
"""

import os
import sys

HERE = os.path.dirname(os.path.realpath(__file__))
ROOT = os.path.dirname(HERE)
sys.path[:] = [ROOT, *(path for path in sys.path if os.path.realpath(path or ".") != HERE)]
from megatron.tasks.main import main

if __name__ == "__main__":
    main()
