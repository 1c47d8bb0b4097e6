"""A shim for tools that call setup.py; metadata and dependencies are in pyproject.toml.

lm-evaluation-harness looks for no models but its own, so the installed package has a line that Python reads at its start
(`megatron_lm_eval.pth`): it does something only where `lm_eval` is the program that starts, and then names the model `megatron`.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PLUGIN = "megatron/evaluation/lm_eval.pth"
ENTRY_SCRIPTS = ("pretrain_*.py", "finetune.py", "train_rl.py")  # megatron/training/launch/entry_scripts.py


class BuildWithEntryScripts(build_py):
    """Puts the line for lm-evaluation-harness beside the packages, and the entry scripts into one of them."""

    def run(self) -> None:
        """Build as ever, and copy these files, too."""
        super().run()
        library = Path(self.build_lib)
        self.copy_file(str(HERE / PLUGIN), str(library / "megatron_lm_eval.pth"))
        self.mkpath(str(library / "megatron/scripts"))
        for script in (path for pattern in ENTRY_SCRIPTS for path in sorted(HERE.glob(pattern))):
            self.copy_file(str(script), str(library / "megatron/scripts" / script.name))


setup(cmdclass={"build_py": BuildWithEntryScripts})
