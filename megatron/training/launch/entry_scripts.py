"""Where the entry scripts (pretrain_gpt.py, finetune.py, ...) are: at the root of a clone; in an installation in megatron/scripts, where
setup.py puts them, so that site-packages gets no modules of such common names.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def entry_script_folder() -> Path:
    """Return the folder of the entry scripts."""
    installed = _PACKAGE / "scripts"
    return installed if installed.is_dir() else _PACKAGE.parent


def make_entry_scripts_importable() -> None:
    """Let `import pretrain_gpt` find the entry script: in this process, and in those that it spawns."""
    folder = str(entry_script_folder())
    if folder not in sys.path:
        sys.path.append(folder)
