"""Answers with their rewards, for people to read: lines of samples.jsonl, and the page samples.html made of the latest of them."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core.datasets.storage import atomic_file, split_text_lines
from megatron.rl.rollout_batches import TrainingRollout
from megatron.training.report.run_log import LogFile, to_json_value

_ROUNDS = 50  # latest rounds on the page
_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em}table{border-collapse:collapse;width:100%;"
    "margin-bottom:2em}th,td{border-bottom:1px solid #ddd;padding:.3em .6em;text-align:left;vertical-align:top}td.n{text-align:right;"
    "font-variant-numeric:tabular-nums}pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}.bar{display:inline-block;height:.7em;"
    "background:#3a7;margin-right:.5em}.failed{color:#b00}"
)


def rollout_sample_records(iteration: int, trained: Sequence[TrainingRollout], prompts: int) -> list[dict[str, Any]]:
    """Return the records of the answers to the first `prompts` prompts of a round, for samples.jsonl."""
    return [
        {
            "iteration": iteration,
            "environment": one.rollout.name,
            "problem": one.rollout.number,
            "prompt": one.rollout.prompt,
            "answer": one.rollout.answer,
            "reward": one.rollout.reward,
            "advantage": one.advantage,
            "tokens": sum(version >= 0 for version in one.rollout.versions),  # also of answers that are not trained on
            "finished": one.rollout.finished,
            "failure": one.rollout.problem,
        }
        for one in trained
        if one.rollout.group < prompts
    ]


class RolloutSampleFiles:
    """samples.jsonl, which is only appended to, and samples.html, in a folder. A resumed run writes rounds again; later
    lines count.
    """

    def __init__(self, folder: Path) -> None:
        self._page, self._path = folder / "samples.html", folder / "samples.jsonl"
        self._file = LogFile(self._path, "the file of samples")
        self._rounds: dict[int, list[dict[str, Any]]] = read_rollout_samples(self._path) if self._path.is_file() else {}

    def write(self, iteration: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append a round's samples, and rewrite the page atomically."""
        lines = [to_json_value(dict(sample)) for sample in samples]
        self._file.add("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._rounds[iteration] = lines
        for number in sorted(self._rounds)[:-_ROUNDS]:
            del self._rounds[number]
        # A full disk ends no run, and the file of samples has told of it.
        with suppress(OSError), atomic_file(self._page, durable=False) as file:
            file.write(rollouts_html_page(self._rounds).encode())


def read_rollout_samples(path: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the samples of each round by iteration; of a round written twice the later ones. Damaged lines are
    skipped.
    """
    rounds: dict[int, list[dict[str, Any]]] = {}
    latest = None
    for line in split_text_lines(path.read_bytes().decode("utf-8", "replace")):
        try:
            sample = json.loads(line)
            iteration = int(sample["iteration"])
        except (ValueError, KeyError, TypeError):
            continue
        if iteration != latest:
            rounds[iteration] = []
        rounds[iteration].append(sample)
        latest = iteration
    return rounds


def rollouts_html_page(rounds: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """Return an HTML page with a table for each round, the latest first; all texts are escaped."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src "
        f"'unsafe-inline'\"><title>Rollouts</title><style>{_STYLE}</style><h1>Rollouts</h1>"
        + "".join(_round_table_html(number, rounds[number]) for number in sorted(rounds, reverse=True))
        + "</html>\n"
    )


def _round_table_html(iteration: int, samples: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for one in samples:
        reward = one.get("reward")
        share = max(0.0, min(1.0, reward)) if isinstance(reward, int | float) else 0.0
        outcome = f"<span class=failed>{html.escape(str(one['failure']))}</span>" if one.get("failure") else ""
        outcome = outcome or ("" if one.get("finished") else "cut off")
        rows.append(
            f"<tr><td><pre>{html.escape(str(one.get('prompt')))}</pre><td><pre>{html.escape(str(one.get('answer')))}</pre>"
            f"<td><span class=bar style=width:{4 * share:.2f}em></span>{html.escape(_format_number(reward))}<td class=n>"
            f"{html.escape(_format_number(one.get('advantage')))}<td class=n>{html.escape(str(one.get('tokens')))}<td>{outcome}"
        )
    return f"<h2>Iteration {iteration}</h2><table><tr><th>prompt<th>answer<th>reward<th>advantage<th>tokens<th></tr>{''.join(rows)}</table>"


def _format_number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else str(value)
