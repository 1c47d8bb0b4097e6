"""Megatron: training transformers at scale, in code that can be read.

`megatron.core` is the library (configs, parallelism, layers, optimizer, checkpoints) and never sees a command line;
`megatron.training` is the program around it.
"""

from pathlib import Path

__version__ = "0.1.0"

if (Path(__file__).parent / "core" / "package_info.py").exists():  # a file of NVIDIA's package, and of none of ours
    raise ImportError(
        f"{Path(__file__).parent} holds the files of two packages, megatron-train and NVIDIA's megatron-core, which share the import "
        "name megatron; install them into environments of their own: pip uninstall megatron-core megatron-train, then "
        "pip install the one that is wanted"
    )
