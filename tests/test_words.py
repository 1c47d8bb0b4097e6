"""Code speaks the language of the field: names that only this repository used to have do not come back.

`NAMES` holds identifiers that no Python file may have, `LOCALS` names that say nothing about a value; a package joins
`PACKAGES` when its names are the field's. What each is called now stands beside it.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Identifiers that are gone everywhere: what to write instead.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "Trail": "FlightRecorder",
        "Journey": "AsyncAllToAll",
        "bring_back": "combine",
        "ByLibrary": "LibraryDispatcher",
        "spread_weights": "permute_weights",
        "_Walk": "_ScriptRunner",
        "_Payload": "_Message",
        "dual_batch": "overlap",
        "Turns": "DualBatchThreads",
        "Deferred": "WeightGradStore",
        "GradientSum": "MainGrad",
        "Rings": "MatmulOverlapOptions",
        "recomputes_thinking": "recomputes_mlp",
        "AheadLayer": "MTPLayer",
        "is_first_copy": "is_first_replica",
        "own_tokens": "scatter_tokens",
        "whole_tokens": "undo_scatter_tokens",
        "Side": "MicrobatchContext",
        "Flight": "_InFlightSave",
        "Sealed": "FileSizeAndHash",
        "embeds": "has_embedding",
        "thinks": "mlp",
        "until_settled": "until_staged",
        "read_sealed": "read_committed",
        "NarrowAdam": "LowPrecisionAdam",
        "put_aside": "offload_activations",
        "see_through": "wait_for_axis",
        "LegacySource": "MegatronSource",
        "TorchDistSource": "MegatronSource",
        "Asked": "CompletionRequest",
        "Ledger": "RunLog",
        "Board": "RendezvousStore",
        "Loads": "ExpertLoads",
        "Recordings": "LayerGraphCapturer",
        "Legacy": "LegacyFlag",
        "Sighting": "SampleUse",
        "Regrouped": "RebalancedBatches",
        "Watchdog": "HangDetector",
        "Guard": "StepValidator",
        "Sentinel": "ReplicaCheck",
        "Dialect": "CheckpointFormat",
        "Alarm": "FailureReporter",
        "Ending": "RunOutcome",
        "Rehearsal": "ShortRun",
        "rehearse": "short_run",
        "Shrunk": "ProxyConfig",
        "Unlike": "TraceMismatch",
        "RoundedBucket": "LowPrecisionBucket",
        "Inner": "UpdateRule",
        "Parcel": "OffloadedBytes",
        "Lane": "SideStream",
        "Slab": "MatrixTask",
        "Holder": "FrozenQuantizedWeight",
        "slabs_of": "matrix_tasks_of_param",
        "holders_of": "quantized_weights_by_param",
        "seed_of": "derive_seed",
        "memory_of": "storage_id_and_offset",
        "dropping_output": "recomputable",
        "are_together": "can_overlap",
        "two_by_two": "one_f_one_b_dual_batch",
        "copied_ranges": "replicated_ranges",
        "kept_as": "encoded_zeros",
        "first_homes": "without_tied_duplicates",
        "lacks_compiler": "missing_compiler",
        "widens_products": "supports_mixed_dtype_addmm",
        "compute_in_batches": "use_batch_scheduling",
        "is_by_muon": "is_updated_as_matrix",
    }
)

# Words in sentences: documentation, docstrings, help texts, messages and comments. `(?i)` patterns: what to write instead.
PHRASES: Mapping[str, str] = MappingProxyType(
    {
        r"dialects?": "checkpoint format",
        r"ledgers?": "run log",
        r"bundles?": "failure dump",
        r"(passes|done|two) in turns": "dual-batch overlap",
        r"few bits": "low precision",
        r"for the night|by day": "nightly, default tier",
        r"whoever|somebody": "name who: the caller, a rank, a process",
        r"rehears\w+": "short run",
        r"(this|the|our) (house|floor|room)": "architecture, layer, package",
        r"homes": "replicas",
        r"put aside|activations aside": "activation offloading",
        r"brought home|come home": "gathered",
        r"the dry run's sketch": "analytic estimate",
    }
)

# Old names that users may still have: of flags, and of a file. And a word of a benchmark's table.
FORMER = {
    ("legacy_table.py", "ledger"),
    ("legacy_table.py", "bundle"),
    ("run_log.py", "ledger"),
    ("vqa_accuracy.py", "somebody"),
}

# Names of variables that say nothing about the value.
LOCALS: Mapping[str, str] = MappingProxyType(
    {
        "said": "message",
        "told": "message",
        "shown": "formatted",
        "meant": "expected",
        "wanted": "requested",
        "asked": "requested",
        "found": "result",
    }
)

# Packages whose variables have names that say what they hold.
PACKAGES: Sequence[str] = (
    "megatron/core/tokenizers",
    "megatron/core/datasets",
    "megatron/core/dist_checkpointing",
    "megatron/core/parallel",
    "megatron/core/pipeline_parallel",
    "megatron/core/tensor_parallel",
    "megatron/core/context_parallel",
    "megatron/core/transformer",
    "megatron/core/config",
    "megatron/core/families",
    "megatron/core/models",
    "megatron/core/optimizer",
    "megatron/core/kernels",
    "megatron/preference",
    "megatron/rl",
    "megatron/core/distributed",
    "megatron/training",
    "megatron/inference",
    "megatron/evaluation",
    "megatron/tasks",
    "megatron/cli",
    "megatron/plan",
    "megatron/verify",
    "benchmarks",
    "tools",
    "tasks",
)


@cache
def identifiers(path: Path) -> Mapping[str, int]:
    """Every identifier of a file, and the first line that has it."""
    lines: dict[str, int] = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            lines.setdefault(token.string, token.start[0])
    return lines


def test_no_file_has_an_identifier_that_the_field_does_not_know() -> None:
    banned = re.compile(r"\b(" + "|".join(NAMES) + r")\b")
    offences = [
        f"{path.relative_to(ROOT)}:{identifiers(path)[name]}: {name} is called {NAMES[name]}"
        for folder in ("megatron", "tools", "tasks", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__).resolve() and banned.search(path.read_text())
        for name in NAMES
        if name in identifiers(path)
    ]
    assert not offences, "\n".join(offences)


def sentences(path: Path) -> str:
    """What a file says to a reader: a page of documentation whole; of code the strings and comments."""
    if path.suffix != ".py":
        return path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    kinds = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    return "\n".join(token.string for token in tokens if token.type in kinds)


def test_sentences_have_the_words_of_the_field() -> None:
    banned = {re.compile(rf"(?i)\b(?:{phrase})\b"): word for phrase, word in PHRASES.items()}
    folders = ("megatron", "tools", "tasks", "docs", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    offences = [
        f"{path.relative_to(ROOT)}: {match[0]!r}: write {word}"
        for path in sorted([*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
        for pattern, word in banned.items()
        for match in pattern.finditer(sentences(path))
        if (path.name, match[0]) not in FORMER
    ]
    assert not offences, "\n".join(offences)


@pytest.mark.parametrize("package", PACKAGES)
def test_variables_say_what_they_hold(package: str) -> None:
    offences = [
        f"{path.relative_to(ROOT)}:{identifiers(path)[name]}: {name}: say what it holds, for example {LOCALS[name]}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in LOCALS
        if name in identifiers(path)
    ]
    assert not offences, "\n".join(offences)
