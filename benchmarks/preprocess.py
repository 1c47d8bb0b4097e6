#!/usr/bin/env python3
"""JSON lines to a file of ids with the GPT-2 BPE: `tools/preprocess_data.py` beside the libraries it stands on.

    python benchmarks/corpus.py runs/corpus runs/corpus.jsonl
    python benchmarks/preprocess.py runs/corpus.jsonl --rounds 3

Every contestant is a process of its own that reads the file, tokenizes the key "text", and writes all ids as uint16 with
the end of document after each; all must write the same bytes. Each round runs them in turn. MB/s is of the file over the
whole process; peak is the proportional memory (PSS) of the process and its children, looked at ten times a second. With
--megatron FOLDER, a checkout of Megatron-LM whose packages are installed, its own tool takes part.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "preprocess_data.py"
GPT2 = ROOT / "examples" / "data" / "gpt2"
READ = """
import json, sys
import numpy as np
corpus, folder, output = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(corpus, encoding="utf-8")]
file = open(output + ".bin", "wb")
def write(ids):
    np.asarray([*ids, 50256], np.uint16).tofile(file)
"""
TOKENIZERS = (
    READ
    + """
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
tokenizer = Tokenizer(models.BPE.from_file(folder + "/vocab.json", folder + "/merges.txt"))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
for low in range(0, len(texts), 1000):
    for found in tokenizer.encode_batch_fast(texts[low : low + 1000]):
        write(found.ids)
"""
)
TIKTOKEN = (
    READ
    + """
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
ranks = data_gym_to_mergeable_bpe_ranks(folder + "/merges.txt", folder + "/vocab.json")
pattern = r"'(?:[sdmt]|ll|ve|re)| ?\\p{L}++| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s++$|\\s+(?!\\S)|\\s"
encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
for ids in encoding.encode_ordinary_batch(texts, num_threads=2):
    write(ids)
"""
)
GIGATOKEN = (
    READ
    + """
import base64, gigatoken, tempfile
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
ranks = data_gym_to_mergeable_bpe_ranks(folder + "/merges.txt", folder + "/vocab.json")
with tempfile.NamedTemporaryFile(suffix=".tiktoken") as written:
    written.writelines(b"%s %d\\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    written.flush()
    encoder = gigatoken.Tokenizer.from_tiktoken(written.name, "gpt2", {})
found = encoder.encode_batch([text.encode() for text in texts]).layout
offsets, ids = np.asarray(found.offsets.data), np.asarray(found.content.data)
for low, high in zip(offsets, offsets[1:]):
    write(ids[low:high])
"""
)
WITHOUT_GIGATOKEN = "import runpy, sys; sys.modules['gigatoken'] = None; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def commands(corpus: Path, vocabulary: Path, output: Path, megatron: Path | None) -> Mapping[str, list[str]]:
    """Name and command of every contestant; each writes OUTPUT.bin, or OUTPUT_text_document.bin."""
    flags = [
        "--input",
        str(corpus),
        "--output-prefix",
        str(output),
        "--append-eod",
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        str(vocabulary / "vocab.json"),
        "--merge-file",
        str(vocabulary / "merges.txt"),
    ]
    scripts = {"tokenizers": TOKENIZERS, "tiktoken": TIKTOKEN, "gigatoken": GIGATOKEN}
    return {
        "ours": [sys.executable, str(TOOL), *flags, "--log-interval", "1000000"],
        "ours, 2 workers": [sys.executable, str(TOOL), *flags, "--log-interval", "1000000", "--workers", "2"],
        "ours without gigatoken": [
            sys.executable,
            "-c",
            WITHOUT_GIGATOKEN,
            str(TOOL),
            *flags,
            "--log-interval",
            "1000000",
        ],
        **{
            name: [sys.executable, "-c", script, str(corpus), str(vocabulary), str(output)]
            for name, script in scripts.items()
        },
        **(
            {"Megatron-LM": [sys.executable, str(megatron / "tools" / "preprocess_data.py"), *flags, "--workers", "2"]}
            if megatron
            else {}
        ),
    }


def tree(process: int) -> list[int]:
    """A process and all that it started."""
    processes = [process]
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        processes += [other for child in task.read_text().split() for other in tree(int(child))]
    return processes


def memory(process: int) -> float:
    """Proportional memory of a process and its children in MB; 0 when it is gone."""
    total = 0
    try:
        for one in tree(process):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    except OSError:
        pass
    return total / 1024


def run(command: list[str]) -> tuple[float, float, float]:
    """(wall seconds, processor seconds, peak MB) of a command."""
    with tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        peak = 0.0
        while True:
            done, status, used = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            peak = max(peak, memory(process.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        errors.seek(0)
        assert os.waitstatus_to_exitcode(status) == 0, errors.read().decode()
    process.returncode = 0
    return seconds, used.ru_utime + used.ru_stime, peak


def digest(output: Path) -> str:
    """A hash of the ids that were written; the files are removed."""
    hasher = hashlib.md5()
    for path in sorted(output.parent.iterdir()):
        if path.suffix == ".bin":
            with open(path, "rb") as file:
                while piece := file.read(2**22):
                    hasher.update(piece)
        path.unlink()
    return hasher.hexdigest()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--vocabulary", type=Path, default=GPT2, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="names of contestants")
    parser.add_argument("--megatron", type=Path)
    args = parser.parse_args()
    size = args.corpus.stat().st_size / 1e6
    with tempfile.TemporaryDirectory(dir=args.corpus.parent) as folder:
        runs = commands(args.corpus, args.vocabulary, Path(folder) / "out", args.megatron)
        chosen = {name: command for name, command in runs.items() if not args.only or name in args.only}
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in chosen}
        written = set()
        for number in range(args.rounds):
            for name, command in chosen.items():
                results[name].append(run(command))
                written.add(digest(Path(folder) / "out"))
                seconds, _, peak = results[name][-1]
                print(
                    f"round {number}: {name} {seconds:.1f} s, {peak:.0f} MB, load {os.getloadavg()[0]:.1f}",
                    file=sys.stderr,
                )
    assert len(written) == 1, "the contestants wrote different ids"
    print(f"{size:.0f} MB, {args.rounds} rounds, the same bytes from all")
    print(f"{'':24}{'wall s':>18}{'MB/s':>8}{'CPU s':>8}{'MB/CPU-s':>10}{'peak MB':>9}  slower than ours, by rounds")
    for name, rounds in results.items():
        walls = [wall for wall, _, _ in rounds]
        wall, processor = statistics.median(walls), statistics.median(used for _, used, _ in rounds)
        ratios = [other[0] / ours[0] for other, ours in zip(rounds, results.get("ours", rounds))]
        print(
            f"{name:24}{f'{wall:.1f} ({min(walls):.1f}-{max(walls):.1f})':>18}{size / wall:8.1f}{processor:8.1f}"
            f"{size / processor:10.1f}{max(peak for _, _, peak in rounds):9.0f}  "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
