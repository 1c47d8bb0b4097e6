"""Share of answers of `megatron generate` that are right: `score.py REFERENCES.jsonl NAME=ANSWERS.jsonl ...`."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Say each share, and fail where a network does not answer by its pictures."""
    with open(sys.argv[1]) as file:
        right = {row["id"]: row["references"] for row in map(json.loads, file)}
    scores: dict[str, float] = {}
    for word in sys.argv[2:]:
        name, _, path = word.partition("=")
        with open(path) as file:
            rows = [json.loads(line) for line in file]
        scores[name] = sum(row.get("text", "").strip() in right[row["id"]] for row in rows) / len(rows)
        print(f"{name:<20} {100 * scores[name]:5.1f} % of {len(rows)} answers are right")
    if scores.get("own pictures", 1) < 0.85 or scores.get("other pictures", 0) > 0.70:
        sys.exit("the network does not see: 85 % with its own pictures and at most 70 % with others are expected")


if __name__ == "__main__":
    main()
