#!/usr/bin/env python3
"""Evaluate or finetune. The code is in megatron/tasks/main.py."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.tasks.main import main

if __name__ == "__main__":
    main()
