"""The planner as a command: what it prints, its JSON and pages, its exit codes, launchers."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist

from megatron.cli.commands.plan import make_layer_estimator
from megatron.cli.preflight import resolve_and_examine
from megatron.core.config.settings.run import RunConfig
from megatron.plan import measure
from megatron.plan.analytic_estimate import with_padded_vocabulary
from megatron.plan.command import parse_training_command
from megatron.plan.hardware import PROFILES, NetworkLink, hardware_from_json, hardware_of
from megatron.plan.layout_search import LayoutRanking
from megatron.plan.simulate.trace import DryRunResult
from tests.helpers.architecture import ROOT
from tests.helpers.world import World
from tests.unit.tools_and_examples.test_launchers import bash

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 10 --lr 1e-3 --mock-data --attention-dropout 0"
)
PP2 = "--pipeline-model-parallel-size 2"
OWN = "--true-vocab-size 1000"
VOCABULARIES = {
    "llama": 128256,
    "gpt_oss": 201088,
    "deepseek": 129280,
    "gpt3": 50257,
    "bert": 30522,
    "t5": 28996,
    "mixtral": 32000,
}
LAUNCHERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "examples").glob("*/*.sh")
    if re.match(r"(train|pretrain)_", path.name) and "small" not in path.name
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The tool as a module."""
    return importlib.import_module("megatron.cli.commands.plan")


def report(tool: ModuleType, capsys: pytest.CaptureFixture[str], words: str, code: int) -> tuple[str, str]:
    """What the tool says on stdout and stderr when it ends with this code."""
    with pytest.raises(SystemExit) as end:
        tool.main(words.split())
    said = capsys.readouterr()
    assert end.value.code == code, said
    return said.out, said.err


def small_machine(folder: Path, memory: float) -> Path:
    """A profile of a machine with so many bytes."""
    path = folder / "small.json"
    path.write_text(json.dumps({**asdict(PROFILES["cpu"]), "memory": memory, "usable": 1.0, "name": "small"}))
    return path


def test_a_run_that_fits_is_planned_on_one_screen_and_one_page(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "deep" / "report.html"
    out, err = report(
        tool, capsys, f"{OWN} --gpu a100-40 --html {page} -- torchrun --nproc_per_node 2 pretrain_gpt.py {RUN} {PP2}", 0
    )
    assert out.startswith("FITS: the fullest rank needs ") and "on a100-40" in out.splitlines()[0]
    assert "2 ranks (pp 2)" in out and "4 microbatches of 1 x 16 tokens" in out and len(out.splitlines()) < 30
    assert re.search(r"peak of rank \d: aten\.\w+ in \w+.*, megatron/core/\S+:\d+", out), out
    assert "running one step dry on 2 ranks" in err and "no rank waits forever" in out
    written = page.read_text(encoding="utf-8")
    assert written.count("<svg") >= 2 and out.splitlines()[0].split(":")[0] in written


@pytest.mark.parametrize(
    "vocabulary, size, says",
    [("demo-vocab.json", 8000, ""), ("away.json", 50257, "away.json: not here; so 50,257 ids are taken")],
)
def test_a_plan_has_the_vocabulary_of_the_tokenizer_at_hand(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], vocabulary: str, size: int, says: str
) -> None:
    data = ROOT / "examples" / "data"
    flags = f"{RUN} --tokenizer-type GPT2BPETokenizer --vocab-file {data / vocabulary} --merge-file {data / 'demo-merges.txt'}".split()
    options, words = tool.parse_arguments(["--world-size", "1", "--", *flags])
    _, config = tool.resolve_setup_or_exit(options, words)
    assert config.model.true_vocab_size == size
    assert says in capsys.readouterr().err


def test_ranks_that_would_wait_forever_are_found(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dry_run = tool.make_dry_runner(hardware_of("a100-40"))

    def without_a_send(config: RunConfig, world_size: int) -> DryRunResult:
        run = dry_run(config, world_size)
        first = run.traces[0]
        place = next(place for place, event in enumerate(first.events) if event.kind == "send")
        return replace(
            run, traces=(replace(first, events=first.events[:place] + first.events[place + 1 :]), *run.traces[1:])
        )

    monkeypatch.setattr(tool, "make_dry_runner", lambda _: without_a_send)
    out, _ = report(tool, capsys, f"{OWN} --world-size 2 --gpu a100-40 {RUN} {PP2}", 1)
    assert out.startswith("NEVER ENDS (see below), and FITS") and "megatron/core/pipeline_parallel/executor.py:" in out


def test_a_run_that_does_not_fit_is_told_what_to_change(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (
        f"{OWN} --world-size 2 {RUN} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    peak = json.loads(report(tool, capsys, f"{words} --json", 0)[0])["ranks"][0]["peak"]
    machine = small_machine(tmp_path, peak - 1)
    out, _ = report(tool, capsys, f"{words} --hardware {machine}", 1)
    assert out.startswith("DOES NOT FIT: ")
    saving = re.search(r"--use-distributed-optimizer saves ([\d.]+) (K|M)iB: .*, FITS", out)
    assert saving, out
    # Planned by itself, the change saves what was said.
    after = json.loads(report(tool, capsys, f"{words} --use-distributed-optimizer --json", 0)[0])["ranks"][0]["peak"]
    assert (peak - after) / {"K": 2**10, "M": 2**20}[saving[2]] == pytest.approx(float(saving[1]), abs=0.006)


def test_a_search_gives_every_layout_a_place_or_a_reason(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = (
        f"{OWN} --search --world-size 2 {RUN} --tensor-model-parallel-size 3"  # what is given need not keep the rules
    )
    found = json.loads(report(tool, capsys, f"{words} --global-batch-size 2 --plans 1 --json", 0)[0])
    assert found["complete"] and len(found["fits"]) + len(found["rejected"]) == found["tried"]
    assert all(one["rules"] and one["says"] for one in found["rejected"])
    assert [one["source"] for one in found["fits"][:2]] == ["dry run", "layers"]
    small = f"{OWN} --search --world-size 1 {RUN} --global-batch-size 1 --plans 0"
    out, _ = report(tool, capsys, small, 0)
    first = re.search(r"^1 +(.*?)  +[\d.]+ [KMG]iB.*layers, within 8%$", out, re.MULTILINE)
    assert first and "layouts fit; the fastest: " + first[1] in out and "were rejected:" in out
    out, _ = report(tool, capsys, f"{words} --plans 0 --hardware {small_machine(tmp_path, 1000)}", 1)
    assert out.startswith("none of ") and "memory" in out


@pytest.mark.parametrize("plans, share", [(1, 0.5), (0, 1.0)])
def test_layers_stop_where_the_time_of_dry_runs_begins(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, plans: int, share: float
) -> None:
    ends: list[float] = []
    monkeypatch.setattr(tool, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(tool, "make_layer_estimator", lambda hardware, passes, until: ends.append(until))
    monkeypatch.setattr(tool, "search_layouts", lambda *_, **options: LayoutRanking(1.0))
    with pytest.raises(SystemExit):
        tool.main(f"{OWN} --search --plans {plans} --seconds 60 --world-size 2 {RUN}".split())
    assert ends == [1000.0 + 60.0 * share]


def test_a_layout_that_follows_the_ranks_is_planned_as_it_would_start(
    tool: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = "--elastic --save x --load x --save-interval 5 --tensor-model-parallel-size 2"
    out, err = report(tool, capsys, f"{OWN} --world-size 7 --gpu a100-40 {RUN} {elastic}", 0)
    # Three pairs of ranks cannot share a global batch of 4; two can.
    assert "4 of 7 ranks train, the others stand by" in err and "4 ranks (tp 2, dp 2)" in out


@pytest.mark.parametrize(
    "words, code, says",
    [
        (f"{RUN} --world-size 3 {PP2}", 1, "world-size: 3 ranks are not a multiple"),
        (f"{RUN} --num-leyers 8", 1, "did you mean --num-layers"),
        (f"{RUN} --hardware nowhere.json", 2, "--measure FILE"),
        ("", 2, "give the flags of a run"),
        (f"{RUN} --search --html x.html", 2, "without --search"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], words: str, code: int, says: str
) -> None:
    out, err = report(tool, capsys, words, code)
    assert says in err and not out


def test_help_and_refusals_do_not_wait_for_torch() -> None:
    for words in (["--help"], [*RUN.split(), "--world-size", "3", *PP2.split()]):
        code = f"import sys; sys.argv[1:] = {words}; from megatron.cli.commands import plan\ntry: plan.main()\nexcept SystemExit: print('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
        assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_this_machine_is_measured(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(measure, "SIZES", {"cpu": (16, 64, 128)})
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "COPIED", {"cpu": 2**20})
    path = tmp_path / "mine.json"
    tool.main(["--measure", str(path)])
    found = hardware_from_json(json.loads(path.read_text()))
    assert found.name == "mine" and [size for size, _ in found.matmul] == [2 * 16**3, 2 * 64**3, 2 * 128**3]
    assert max(share for _, share in found.matmul) == 1.0 and found.sleep >= 0 and found.memory > 2**28


def measured_link() -> NetworkLink:
    """The link between two ranks, on each of them."""
    return measure.measure_link(range(dist.get_world_size()), measure.pick_device())


def test_all_ranks_learn_the_link_that_was_measured(world) -> None:
    ranks: World = world(2)
    found = ranks.run(measured_link)
    assert found[0] == found[1] and found[0].rate > 0 and found[0].latency > 0


@pytest.mark.parametrize(
    "small, large, rate", [(1e-3, 11e-3, 1e-2), (2e-2, 2.1e-2, 2.1e-2), (2e-2, 1e-2, 1e-2), (0.0, 4.0, 4.0)]
)
def test_a_link_that_was_measured_in_noise_is_no_faster_than_its_large_sum(
    small: float, large: float, rate: float
) -> None:
    found = measure.link_from_times(small, large, 4)
    assert found.rate == pytest.approx(2 * 3 / 4 * 4 * measure.LARGE / rate) and found.latency == pytest.approx(
        max(small / 6, 1e-7)
    )


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(launcher, marks=() if "llama3_70b" in launcher else pytest.mark.nightly) for launcher in LAUNCHERS],
)
def test_a_launcher_fits_gpus_of_80_gb_by_its_layers(launcher: str, tmp_path: Path) -> None:
    environment = {"GPUS_PER_NODE": "8"} | ({"NUM_NODES": "128"} if "gpt3" in launcher else {})
    printed = bash([str(ROOT / launcher), *paths_of(launcher)], tmp_path, LAUNCH="echo torchrun", **environment).stdout
    command = parse_training_command(shlex.split(printed))
    assert command.setting is not None and not command.unread
    setting = command.setting.with_elastic_layout()
    config, problems = resolve_and_examine(setting.config, setting.world_size)
    assert not problems
    config = with_padded_vocabulary(config, VOCABULARIES.get(launcher.split("/")[1], 151936))
    machine, ranks = PROFILES["h100-80"], setting.world_size
    estimate = make_layer_estimator(machine, setting.passes, until=math.inf)(config, ranks)
    assert estimate is not None
    needs = estimate.needs + sum(command.beside(config, ranks).values())
    assert needs <= machine.usable_bytes(), f"{needs / 2**30:.2f} of {machine.usable_bytes() / 2**30:.2f} GiB"


def paths_of(launcher: str) -> list[str]:
    """Words for the paths that a launcher asks for, of which nothing is opened."""
    usage = re.search(rf"^# +bash {launcher} (.*) \[more", (ROOT / launcher).read_text(encoding="utf-8"), re.MULTILINE)
    return usage.group(1).replace("[", "").replace("]", "").lower().split()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_full_size_launcher_can_be_planned(launcher: str, tmp_path: Path) -> None:
    vocabulary = VOCABULARIES.get(launcher.split("/")[1], 151936)
    environment = {
        **os.environ,
        "LAUNCH": f"{sys.executable} -m megatron plan --gpu h100-80 --true-vocab-size {vocabulary} --json --seconds 1 --",
        "PYTHONPATH": str(ROOT),
        "GPUS_PER_NODE": "8",
        "OMP_NUM_THREADS": "1",
    } | ({"NUM_NODES": "128"} if "gpt3" in launcher else {})
    done = subprocess.run(
        ["bash", str(ROOT / launcher), *paths_of(launcher)],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=900,
    )
    assert done.returncode == 0 and done.stdout.startswith("{"), (
        f"it does not fit, or cannot be planned: {done.stdout[-1000:]}{done.stderr[-2000:]}"
    )
    found = json.loads(done.stdout)
    assert found["time"]["seconds"] > 0 and 0.02 < found["time"]["mfu"] < 0.9 and found["ranks"][0]["peak"] > 2**20


@pytest.mark.parametrize("task, holds", [("dpo", True), ("reward", False)])
def test_what_is_held_beside_training_is_that_of_the_flags_without_a_command(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], task: str, holds: bool
) -> None:
    run = RUN.replace("--mock-data", "--data-path x.jsonl --pretrained-checkpoint base")
    words = f"{OWN} --world-size 1 --entry finetune.py -- {run} --hidden-dropout 0 --finetune-task {task}"
    out, _ = report(tool, capsys, words, 0)
    assert ("beside that a rank holds: reference" in out) == ("forward passes without gradients" in out) == holds
