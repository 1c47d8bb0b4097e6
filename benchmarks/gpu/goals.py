"""What is wanted on a GPU, and what of it the results show: met, missed, or not measured.

python benchmarks/gpu/goals.py FOLDER        the verdict on the results in a folder
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu import results, roofline

Line = Mapping[str, Any]
Lines = Sequence[Line]


@dataclass(frozen=True, slots=True)
class Goal:
    """One figure. figure_of: takes it from all lines; None: not measured. bound: it must be at least (or, with at_most, at most) that."""

    name: str
    unit: str
    bound: float
    figure_of: Callable[[Lines], float | None]
    wish: float | None = None
    at_most: bool = False

    def verdict(self, lines: Lines) -> tuple[str, str]:
        """(met, missed or not measured; the line that says so)."""
        figure, relation = self.figure_of(lines), "at most" if self.at_most else "at least"
        goal = f"{relation} {self.bound:g}{self.unit}" + ("" if self.wish is None else f", hoped for {self.wish:g}")
        if figure is None:
            return "not measured", f"not measured  {self.name}: {goal}"
        met = figure <= self.bound if self.at_most else figure >= self.bound
        word = "met" if met else "missed"
        return word, f"{word:12}  {self.name}: {figure:.4g}{self.unit} ({goal})"


def of(lines: Lines, section: str, **names: Any) -> Iterator[Line]:
    """The lines of a section with these names, without those of measurements that failed."""
    for line in lines:
        if line["section"] == section and "failed" not in line and all(line.get(k) == v for k, v in names.items()):
            yield line


def _largest(figures: Iterable[float]) -> float | None:
    return max(figures, default=None)


def _smallest(figures: Iterable[float]) -> float | None:
    return min(figures, default=None)


def best(figure: str, **names: Any) -> Callable[[Lines], float | None]:
    """The largest of a figure of training among all flags."""
    return lambda lines: _largest(line[figure] for line in of(lines, "train", **names))


def beside_plain(lines: Lines) -> float | None:
    """The smaller of both networks' ratios to the plain loop, each with its best flags."""
    ratios = []
    for line in of(lines, "plain"):
        steps = [run["step_s"] for run in of(lines, "train", network=line["network"])]
        ratios += [line["step_s"] / min(steps)] if steps else []
    return _smallest(ratios)


def memory_error(lines: Lines) -> float | None:
    """The largest difference of a run's peak from its plan, percent."""
    runs = [line for line in of(lines, "train") if line["planned_gb"] == line["planned_gb"]]
    return _largest(100 * abs(line["memory_gb"] / line["planned_gb"] - 1) for line in runs)


def decode_ratio(lines: Lines) -> float | None:
    """Time of a step of 32 texts over the least that its bytes take, by the best way."""
    return _smallest(line["ratio"] for line in of(lines, "decode", rows=32))


def failures(step: str) -> Callable[[Lines], float | None]:
    """Tests of a step that failed when they last ran; None: none failed, and the step did not come to its end."""

    def figure_of(lines: Lines) -> float | None:
        codes = [bool(line["code"]) for line in of(lines, "step", step=step) if line["ended"]]
        failed = list(results.outcomes(list(lines), step).values()).count("failed")
        return float(failed or codes[-1]) if codes else (float(failed) or None)

    return figure_of


def behind_roofline(lines: Lines) -> float | None:
    """By how many points of MFU a run differs most from what is computed for its flags."""
    gaps = []
    for name, network in zip(("1.3b", "llama"), roofline.NETWORKS, strict=True):
        for line in of(lines, "train", network=name):
            machine = next((one for one in roofline.MACHINES if one.name in line.get("gpu", "")), None)
            if machine is not None:
                computed = {one.way: one.mfu for one in roofline.expected(network, machine)}
                gaps.append(abs(line["mfu"] - computed[_way(line["flags"])]))
    return _largest(gaps)


def _way(flags: str) -> str:
    """The way of the roofline that has these flags."""
    if "--compile" not in flags:
        return "the same, Triton loss" if "impl triton" in flags else "a GPU's default kernels"
    return "--compile, Triton loss" if "impl triton" in flags else "--compile"


GOALS = (
    Goal("tests/gpu: failures", "", 0, failures("tests"), at_most=True),
    Goal("parity rows over NCCL, several ranks on one GPU: failures", "", 0, failures("parity"), at_most=True),
    Goal("GPT 1.3B, 2,048 tokens, bf16: causal MFU", " %", 50, best("mfu", network="1.3b"), 60),
    Goal("8 layers of Llama 8B, 4,096 tokens, bf16: causal MFU", " %", 55, best("mfu", network="llama"), 65),
    Goal("8 layers of Llama 8B, 8,192 tokens, fp8", " TFLOP/s", 750, best("tflops", network="llama fp8")),
    Goal("a step beside the plain compiled loop", " x", 1.15, beside_plain),
    Goal(
        "layers of experts beside dense ones of equal FLOPs",
        " x",
        0.8,
        lambda lines: _smallest(line["ratio"] for line in of(lines, "experts")),
    ),
    Goal("peak memory beside the plan", " %", 5, memory_error, at_most=True),
    Goal("decoding 32 texts beside the bytes' floor", " x", 1.5, decode_ratio, at_most=True),
    Goal(
        "MFU beside the computed roofline (beyond it: find the reason)",
        " points",
        roofline.BEHIND,
        behind_roofline,
        at_most=True,
    ),
)


def verdict(lines: Lines) -> str:
    """A line a goal, and how many were met."""
    words, messages = zip(*(goal.verdict(lines) for goal in GOALS), strict=True)
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("met", "missed", "not measured"))
    return "\n".join((*messages, f"verdict: {counts}, of {len(GOALS)} goals"))


if __name__ == "__main__":
    print(verdict(results.read(Path(sys.argv[1]) / results.FILE)))
