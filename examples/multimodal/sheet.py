"""A picture of some questions with their pictures and what was answered: `sheet.py FOLDER OUT.png`, as run.sh ends.

The first row has questions with their own pictures, the second the same questions with others, a third captions. Wrong answers are red.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

SIDE, TEXT, COLUMNS, COUNT = 96, 34, 5, 5
MARKS = {True: "#107010", False: "#b02010"}


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file."""
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def tiles(folder: Path, name: str, references: str) -> list[tuple[str, str, str, bool]]:
    """Picture, question, answer and whether it is right, of the first prompts of a file."""
    right = {row["id"]: row["references"] for row in lines(folder / references)}
    answers = lines(folder / f"{name}.answers.jsonl")
    result = []
    for row, answer in list(zip(lines(folder / f"{name}.jsonl"), answers, strict=True))[:COUNT]:
        text = answer.get("text", "").strip()
        question = row["messages"][0]["content"].removeprefix("<image> ")
        result.append((row["images"][0], question, text, text in right[row["id"]]))
    return result


def broken(text: str, width: int) -> str:
    """A text in lines of this many characters at most."""
    result = [""]
    for word in text.split():
        if len(result[-1]) + len(word) >= width and result[-1]:
            result.append("")
        result[-1] = f"{result[-1]} {word}".strip()
    return "\n".join(result)


def main() -> None:
    """Write the picture."""
    folder, out = Path(sys.argv[1]), sys.argv[2]
    shown = tiles(folder, "test", "test.jsonl") + tiles(folder, "shuffled", "shuffled.jsonl")
    if (folder / "captions.answers.jsonl").exists():
        shown += tiles(folder, "captions", "references.jsonl")
    width, height = SIDE + 64, SIDE + 2 * TEXT
    sheet = Image.new("RGB", (COLUMNS * width, -(-len(shown) // COLUMNS) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (path, question, answer, right) in enumerate(shown):
        left, top = place % COLUMNS * width, place // COLUMNS * height
        picture = Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
        sheet.paste(picture, (left + (width - SIDE) // 2, top + 4))
        pen.multiline_text((left + 6, top + SIDE + 8), broken(question, 25), fill="black")
        pen.multiline_text((left + 6, top + SIDE + TEXT + 4), broken(answer, 25), fill=MARKS[right])
    sheet.quantize(64).save(out, optimize=True)


if __name__ == "__main__":
    main()
