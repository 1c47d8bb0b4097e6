#!/usr/bin/env python3
"""`megatron show-layout` under its former name, for one release."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent), *(path for path in sys.path if Path(path).resolve() != HERE)]
from megatron.cli.former_names import main

if __name__ == "__main__":
    main()
