#!/usr/bin/env python3
"""EleutherAI's lm-evaluation-harness with the model `megatron`, from a checkout: its command line goes to lm_eval as it is.

    python tasks/harness.py --model megatron --model_args load=runs/quickstart/checkpoints --tasks lambada_openai
    torchrun --nproc_per_node 4 tasks/harness.py --model megatron --tasks hellaswag --batch_size auto \\
        --model_args load=FOLDER,tensor_model_parallel_size=2,pipeline_model_parallel_size=2

Where the package is installed, `lm_eval --model megatron` does the same. Needs `pip install lm-eval`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__" and importlib.util.find_spec("lm_eval") is None:
    sys.exit("tasks/harness.py needs the package lm-eval, which is not installed: pip install lm-eval")

from megatron.evaluation.harness import main

if __name__ == "__main__":
    main()
