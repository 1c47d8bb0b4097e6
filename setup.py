"""Packaging: `pip install .` brings the library, the programme and the three entry scripts as modules.

After it, `torchrun -m pretrain_gpt ...` works from any folder. The tested versions are in requirements.txt; here stand
only the floors that the code needs, and the optional packages by what they are for.

lm-evaluation-harness looks for no models but its own, so the installed package has a line that Python reads at its start
(`megatron_lm_eval.pth`): it does something only where `lm_eval` is the programme that starts, and then names the model `megatron`.
"""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
PLUGIN = "megatron/evaluation/lm_eval.pth"
ENTRIES = ("pretrain_gpt", "pretrain_bert", "pretrain_t5")


class BuildWithPlugin(build_py):
    """Puts the line for lm-evaluation-harness beside the packages."""

    def run(self) -> None:
        """Build as ever, and copy one file more."""
        super().run()
        self.copy_file(str(HERE / PLUGIN), str(Path(self.build_lib) / "megatron_lm_eval.pth"))


setup(
    name="megatron",
    version="0.1.0",
    description="Training transformers at scale, in code that can be read",
    license="Apache-2.0",
    cmdclass={"build_py": BuildWithPlugin},
    python_requires=">=3.10",
    packages=find_packages(include=("megatron", "megatron.*")),
    package_data={"megatron.core.datasets.ingest": ["punkt/README.md", "punkt/*/*"], "megatron.inference.server": ["page.html"],
                  "megatron.trust": ["report.html"], "megatron.evaluation": ["lm_eval.pth"]},
    py_modules=[name for name in ENTRIES if (HERE / f"{name}.py").exists()],
    install_requires=["torch>=2.11", "numpy>=1.26", "tokenizers>=0.19", "tiktoken>=0.7", "sentencepiece>=0.2", "safetensors>=0.4",
                      "xxhash>=3.0", "fsspec>=2023.1", "Jinja2>=3.1", "PyYAML>=6.0", "tqdm>=4.60"],
    extras_require={
        "tensorboard": ["tensorboard>=2.14"],
        "wandb": ["wandb>=0.16"],
        "plots": ["matplotlib>=3.7"],
        "server": ["fastapi>=0.110", "uvicorn>=0.29"],
        "eval": ["lm-eval>=0.4.13"],
        "sentences": ["nltk>=3.9"],
        "files": ["pyarrow>=14", "zstandard>=0.21"],
        "fast-tokens": ["gigatoken>=0.10"],
        "te": ["transformer-engine[pytorch]>=2.0"],
        "flash": ["flash-attn>=2.6"],
        "dev": ["pytest>=8.0", "tensorboard>=2.14", "matplotlib>=3.7", "transformers>=4.45"],
    },
)
