"""The scripts for the first minutes on a GPU, as far as a machine without one can try them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import calls, goals, launches, layers, results, roofline, timing
from benchmarks.train_gpu import Job, Work, profile_of, works

ROOT = Path(__file__).resolve().parents[1]
PLAIN = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def python(*words: str, more: dict[str, str] | None = None, seconds: float = 500) -> subprocess.CompletedProcess[str]:
    """A script of its own process."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words],
        cwd=ROOT,
        env={**PLAIN, **(more or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def quick(name: str, code: str, limit: float = 60.0, *, gpu: bool = False) -> calls.Step:
    return calls.Step(name, ("-c", code), limit, gpu=gpu)


def made(monkeypatch: pytest.MonkeyPatch, *steps: calls.Step) -> None:
    monkeypatch.setattr(calls, "CALLS", {1: steps})


def lines_of(out: Path, section: str) -> list[dict[str, Any]]:
    return [line for line in results.read(out / results.FILE) if line["section"] == section]


def test_a_call_skips_what_needs_a_gpu_and_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made(monkeypatch, quick("plain", "print('computed')"), quick("gpu", "print('never')", gpu=True))
    assert calls.call(1, tmp_path, gpu=False, seconds=100, again=False) == 0
    told = capfd.readouterr().out
    assert "computed" in told and "gpu: left out, there is no GPU" in told and "never" not in told
    assert (tmp_path / "plain.txt").read_text() == "computed\n"
    calls.call(1, tmp_path, gpu=False, seconds=100, again=False)
    assert "plain: done in an earlier call" in capfd.readouterr().out
    calls.call(1, tmp_path, gpu=False, seconds=100, again=True)
    assert len(lines_of(tmp_path, "step")) == 2


def test_a_step_is_ended_at_its_limit_with_what_it_started_and_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True); time.sleep(600)"
    monkeypatch.setattr(calls, "SHORTEST", 0.0)
    made(monkeypatch, quick("slow", child, 4.0), quick("later", "print('there')"))
    assert calls.call(1, tmp_path, gpu=False, seconds=100, again=False) == 1
    pid = (tmp_path / "slow.txt").read_text().strip()
    state = Path(f"/proc/{pid}/stat").read_text().split()[2] if Path(f"/proc/{pid}").exists() else "gone"
    assert not pid or state in ("Z", "gone"), "what a step started ends with it"
    assert [line["ended"] for line in lines_of(tmp_path, "step")] == [False, True]
    assert not calls.ended(calls.CALLS[1][0], tmp_path) and calls.ended(calls.CALLS[1][1], tmp_path)


def test_what_does_not_fit_in_a_call_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made(monkeypatch, quick("never", "print('x')"))
    assert calls.call(1, tmp_path, gpu=False, seconds=1, again=False) == 1
    assert not (tmp_path / "never.txt").exists()


def test_no_call_may_take_nine_minutes_and_every_step_is_a_file_of_the_project() -> None:
    assert calls.SECONDS < 540
    for steps in calls.CALLS.values():
        assert len({step.name for step in steps}) == len(steps)
        for step in steps:
            assert step.limit <= calls.SECONDS
            files = [word for word in step.words if word.endswith((".py", ".sh"))]
            assert all((ROOT / word).is_file() for word in files), step


@pytest.mark.nightly
def test_the_rows_of_the_call_over_nccl_are_rows_of_the_table() -> None:
    (step,) = (one for one in calls.CALLS[4] if one.name == "parity")
    found = python(*step.words, "--collect-only")
    assert f"test_layouts.py: {len(calls.PARITY)}" in found.stdout, found.stdout[-2000:] + found.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4])
def test_every_call_runs_to_its_end_without_a_gpu(number: int, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "benchmarks/gpu/run.sh", "--call", str(number), "--out", str(tmp_path)],
        cwd=ROOT,
        env={**PLAIN, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0 and "verdict: 0 met, 0 missed" in done.stdout, done.stdout + done.stderr
    assert (done.stdout.count("there is no GPU") == len(calls.CALLS[number])) == (number > 0)


LINES = [
    {"section": "train", "network": "1.3b", "flags": "", "mfu": 49.0, "tflops": 480.0, "memory_gb": 40.0,
     "planned_gb": 39.0, "gpu": "NVIDIA H100 80GB HBM3"},
    {"section": "train", "network": "1.3b", "flags": "--compile", "mfu": 52.0, "tflops": 510.0, "memory_gb": 41.0,
     "planned_gb": 39.0, "gpu": "NVIDIA H100 80GB HBM3"},
    {"section": "train", "network": "llama", "flags": "", "failed": "no memory"},
    {"section": "plain", "network": "1.3b", "ratio": 1.2},
    {"section": "decode", "rows": 32, "ratio": 1.4},
    {"section": "decode", "rows": 1, "ratio": 9.0},
    {"section": "step", "step": "tests", "code": 1, "ended": True},
]  # fmt: skip


def test_a_verdict_says_what_was_met_missed_and_not_measured() -> None:
    found = {goal.name: goal.verdict(LINES)[0] for goal in goals.GOALS}
    met = {name for name, word in found.items() if word == "met"}
    assert {name.split(":")[0].split(",")[0] for name, word in found.items() if word == "missed"} == {
        "tests/gpu",
        "peak memory beside the plan",
    }
    assert len(met) == 4 and "MFU beside the computed roofline (beyond it: find the reason)" in met
    assert goals.verdict(LINES).endswith("verdict: 4 met, 2 missed, 4 not measured, of 10 goals")
    assert "0 met, 0 missed" in goals.verdict([])


def test_results_are_whole_lines_and_a_failed_one_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "folder" / results.FILE
    monkeypatch.setenv("BENCHMARK_RESULTS", str(file))
    results.keep("rates", what="copy", tb_s=2.0)
    results.keep("rates", what="matmul", failed="no memory")
    with file.open("a") as stream:
        stream.write('{"section": "rat')  # the machine was taken away
    assert results.done("rates", what="copy") and not results.done("rates", what="matmul")
    assert len(results.read(file)) == 2


def test_what_was_trained_is_not_trained_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / results.FILE))
    job = Job("1.3b", "", "--layers 1", 1.0)
    assert [work.extra for work in works([job], [[], ["--compile"]])] == [[], ["--compile"], None]
    results.keep("train", network="1.3b", flags="--compile", mfu=1.0)
    assert works([job], [[], ["--compile"]]) == [Work(job, 0.3, []), Work(job, 0.4, None)]


def test_a_profile_counts_launches_and_the_time_in_which_the_gpu_is_busy(tmp_path: Path) -> None:
    events = [
        {"cat": "kernel", "name": "a", "ts": 0, "dur": 40},
        {"cat": "kernel", "name": "b", "ts": 20, "dur": 40},  # on another stream
        {"cat": "kernel", "name": "a", "ts": 80, "dur": 20},
        {"cat": "cpu_op", "name": "launch", "ts": 0, "dur": 500},
    ]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    found = profile_of(trace)
    assert found is not None and found.launches == 3 and found.longest[0] == ("a", pytest.approx(60e-6), 2)
    assert found.busy == pytest.approx(80e-6) and found.seconds == pytest.approx(100e-6)
    assert profile_of(tmp_path / "none.json") is None


def test_a_call_is_timed_by_events_around_many_and_the_host_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            noted.append("event")

        def elapsed_time(self, _: Event) -> float:
            return 30.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: noted.append("wait"))
    found = timing.one_round(lambda: noted.append("call"), torch.device("cuda"), 3)
    assert found.device == pytest.approx(0.01) and 0 <= found.host != found.device
    assert noted == ["wait", "event", "call", "call", "call", "event", "wait"]


def test_the_computed_roofline_is_the_sum_of_bytes_and_operations() -> None:
    h100 = {one.way: one for one in roofline.expected(roofline.NETWORKS[0], roofline.MACHINES[0])}
    network = roofline.NETWORKS[0]
    work = 16384 * (24 * 6 * (4 * 2048**2 + 2 * 2048 * 8192) + 6 * 50304 * 2048)
    assert network.tflop == pytest.approx((work + 24 * 6 * 2048 * 2048 * 2048 * 8) / 1e12)
    assert h100["eager"].mfu == pytest.approx(53.1, abs=0.1)
    assert h100["--compile, Triton loss"].mfu == pytest.approx(56.6, abs=0.1)
    assert roofline.table() in (ROOT / "docs" / "benchmarks.md").read_text(), "benchmarks/gpu/roofline.py --write"


def test_the_table_of_launches_has_a_row_for_every_configuration() -> None:
    page = launches.PAGE.read_text()
    table = re.split(f"{launches.BEGIN}|{launches.END}", page)[1]
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert names == list(launches.CASES), "benchmarks/gpu/launches.py --write"
    name = names[3]
    changed = launches.with_rows(page, {name: f"| {name} | 1 | 2 | 3 | 4 | 5 |"})
    assert changed.count("\n") == page.count("\n") and f"| {name} | 1 |" in changed


@pytest.mark.nightly
@pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-in is for a torch without CUDA")
def test_small_layers_are_measured_in_every_way_on_the_stand_in(tmp_path: Path) -> None:
    file = tmp_path / results.FILE
    more = {"PYTHON": sys.executable, "BENCHMARK_RESULTS": str(file)}
    done = subprocess.run(
        ["bash", "tests/without_gpu/run.sh", "benchmarks/gpu/layers.py", "--small"],
        cwd=ROOT,
        env={**PLAIN, **more},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = {line["way"]: line for line in results.read(file)}
    assert done.returncode == 0 and set(lines) == set(layers.WAYS), done.stdout + done.stderr
    assert not [line for line in lines.values() if "failed" in line]
    assert all(line["tflops"] > 0 and line["peak_gb"] > 0 for line in lines.values())


@pytest.mark.nightly
@pytest.mark.skipif(torch.version.cuda is not None, reason="the stand-in is for a torch without CUDA")
def test_launches_are_counted_on_the_stand_in() -> None:
    words = ["bash", "tests/without_gpu/run.sh", "benchmarks/gpu/launches.py", "--only", "gpt"]
    done = subprocess.run(words, cwd=ROOT, env=PLAIN, capture_output=True, text=True, timeout=500, check=False)
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("| gpt |")]
    layer, waits = int(row.split("|")[2]), int(row.split("|")[5])
    assert 25 <= layer <= 45 and waits == 0, row


@pytest.mark.nightly
@pytest.mark.parametrize("problem", ["", "spills", "no case", "not launched", "does not compile"])
def test_every_triton_kernel_compiles_for_a_hopper_and_spills_nothing(problem: str) -> None:
    pytest.importorskip("triton")
    spoiled = {
        "": "pass",
        "spills": "m.SPILLS = -1; sys.argv.append('--only=_rotate')",
        "no case": "del m.CASES['rotary']",
        "not launched": "m.CASES['gated_activation'] = {}",
        "does not compile": "m.CASES['rotary'] = {'odd': lambda op: op(m.draw(2, 2, 2, 6), None, None, False)}",
    }[problem]
    code = f"import sys; from benchmarks.gpu import triton_to_sm90 as m; {spoiled}; sys.exit(m.main())"
    done = python("-c", code)
    assert (done.returncode == 0) == (problem == ""), done.stdout[-3000:] + done.stderr[-3000:]
    expected = {
        "": "none spills",
        "spills": "rotary._rotate_token (rotary 64) spills 0 bytes; -1 are allowed",
        "no case": "rotary has a Triton kernel and no case",
        "not launched": "pointwise._gated_activation of megatron/core/kernels/triton/pointwise.py was launched by no case",
        "does not compile": "rotary (odd): AttributeError",
    }[problem]
    assert expected in done.stdout, done.stdout[-3000:]


def test_each_rank_is_a_host_of_its_own_to_nccl() -> None:
    code = (
        "import multiprocessing, os\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('forkserver')\n"
        "    names = [os.environ['NCCL_HOSTID']]\n"
        "    for _ in range(2):\n"
        "        with context.Pool(1) as pool: names.append(pool.apply(os.getenv, ('NCCL_HOSTID',)))\n"
        "    print(len(set(names)), os.environ['NCCL_SOCKET_IFNAME'])\n"
    )
    shim = str(ROOT / "benchmarks/gpu/hostid")
    done = python("-c", code, more={"PYTHONPATH": shim})
    assert done.stdout == "3 lo\n", done.stdout + done.stderr


def test_a_rank_of_torchrun_is_a_host_of_its_own_to_nccl() -> None:
    words = ["bash", "benchmarks/gpu/one_gpu_rank.sh", "-c", "import os; print(os.environ['NCCL_HOSTID'])"]
    environment = {**PLAIN, "PYTHON": sys.executable, "RANK": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "rank1\n", done.stderr
    del environment["RANK"]
    assert subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False).returncode != 0
