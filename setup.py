"""A shim for tools that call setup.py; metadata and dependencies are in pyproject.toml.

lm-evaluation-harness looks for no models but its own, so the installed package has a line that Python reads at its start
(`megatron_lm_eval.pth`): it does something only where `lm_eval` is the program that starts, and then names the model `megatron`.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PLUGIN = "megatron/evaluation/lm_eval.pth"


class BuildWithLmEvalPlugin(build_py):
    """Puts the line for lm-evaluation-harness beside the packages."""

    def run(self) -> None:
        """Build as ever, and copy one file more."""
        super().run()
        self.copy_file(str(HERE / PLUGIN), str(Path(self.build_lib) / "megatron_lm_eval.pth"))


setup(cmdclass={"build_py": BuildWithLmEvalPlugin})
