"""Megatron: training transformers at scale, in code that can be read.

`megatron.core` is the library (configs, parallelism, layers, optimizer, checkpoints) and never sees a command line;
`megatron.training` is the program around it.
"""

from pathlib import Path

__version__ = "0.1.0"

_CORE = Path(__file__).parent / "core"
if (_CORE / "package_info.py").exists():  # a file of NVIDIA's package, and of none of ours
    raise ImportError(
        f"{_CORE.parent} holds the files of two packages, megatron-train and NVIDIA's megatron-core, which share the import "
        "name megatron; install them into environments of their own: pip uninstall -y megatron-core megatron-train (both: pip "
        "removes the files that they share with either), then install the one that is wanted, this one by pip install . in a clone"
    )
if not (_CORE / "__init__.py").exists():  # a file of both
    raise ImportError(
        f"files of megatron-train are missing in {_CORE.parent}: pip removed those that it shares with NVIDIA's megatron-core when "
        "that was uninstalled; install it again, in a clone: pip install --force-reinstall --no-deps ."
    )
