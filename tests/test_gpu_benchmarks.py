"""The scripts for the first minutes on a GPU, as far as a machine without one can try them."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import kernels
from benchmarks.gpu import calls, goals, launches, layers, pieces, results, roofline, timing
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


def names_of_ours(path: Path) -> set[tuple[str, str]]:
    """(module of ours, name in it) that a script reads, if the module is called by its name."""
    modules, names = {}, set[tuple[str, str]]()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (ROOT / f"{(node.module or '-').replace('.', '/')}.py").is_file():
            names |= {(str(node.module), alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and "importorskip(" in ast.unparse(node.value):
            modules[ast.unparse(node.targets[0])] = ast.literal_eval(node.value.args[0])
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if (ROOT / f"{module.replace('.', '/')}.py").is_file():
                names.add((module, node.attr))
    return names


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "tests" / "gpu").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]),
    ids=lambda path: path.name,
)
def test_what_a_script_for_gpus_names_is_there(path: Path) -> None:
    names = names_of_ours(path) - {
        ("megatron.core.parallel_state", "initialize_model_parallel")
    }  # of Megatron Core, for its times
    if any(".triton." in module for module, _ in names):
        pytest.importorskip("triton")
    assert [name for name in sorted(names) if not hasattr(importlib.import_module(name[0]), name[1])] == []


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


def test_what_is_in_a_session_of_its_own_ends_with_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True).pid, flush=True)"
    made(monkeypatch, quick("torchrun", child))
    assert calls.call(1, tmp_path, gpu=False, seconds=100, again=False) == 0
    pid = (tmp_path / "torchrun.txt").read_text().strip()
    state = Path(f"/proc/{pid}/stat").read_text().split()[2] if Path(f"/proc/{pid}").exists() else "gone"
    assert pid and state in ("Z", "gone"), "ranks of torchrun are in sessions of their own"


def test_a_step_that_failed_is_done_again_and_one_that_broke_the_gpu_is_started_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = f"import pathlib, sys; file = pathlib.Path({str(tmp_path / 'seen')!r}); first = not file.exists(); file.touch(); sys.exit({{}} * first)"
    made(monkeypatch, quick("failed", once.format(1)))
    assert calls.call(1, tmp_path, gpu=False, seconds=100, again=False) == 1
    assert calls.call(1, tmp_path, gpu=False, seconds=100, again=False) == 0
    assert [line["code"] for line in lines_of(tmp_path, "step")] == [1, 0]
    (tmp_path / "seen").unlink()
    made(monkeypatch, quick("broken", once.format(results.AGAIN)))
    assert calls.call(1, tmp_path, gpu=False, seconds=100, again=False) == 0
    assert [line["code"] for line in lines_of(tmp_path, "step")][2:] == [0]


def test_every_step_has_its_share_of_a_short_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calls, "SHORTEST", 0.0)
    steps = quick("long", "import time; time.sleep(600)", 30), quick("told", "print('{seconds}')", 400)
    made(monkeypatch, *steps, quick("last", "print('there')", 10))
    assert calls.call(1, tmp_path, gpu=False, seconds=30, again=False) == 1
    told, limits = capfd.readouterr().out, []
    for name in ("long", "told", "last"):
        limits.append(float(re.search(f"-- {name}: at most ([0-9]+) s", told)[1]))
    assert limits[0] == 2 and 25 <= limits[1] <= 28 and "there" in told
    assert (tmp_path / "told.txt").read_text().strip() in {str(int(limits[1]) - less) for less in (7, 8, 9)}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_call_that_is_stopped_keeps_what_it_has_and_goes_on(tmp_path: Path, ending: signal.Signals) -> None:
    code = (
        "import signal, sys\nfrom benchmarks.gpu import calls\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # where the suite runs in the background, it is ignored
        "steps = [calls.Step('quick', ('-c', 'print(1)'), 60, gpu=False),"
        " calls.Step('slow', ('-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'), 60, gpu=False)]\n"
        "calls.CALLS = {1: tuple(steps)}\ncalls.has_gpu = lambda: (False, 'no GPU')\nsys.exit(calls.main())"
    )
    words = [sys.executable, "-u", "-c", code, "--call", "1", "--out", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=PLAIN) as process:
        assert process.stdout is not None
        while not (tmp_path / "slow.txt").exists() or not (tmp_path / "slow.txt").read_text().strip():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(ending)
        told = process.stdout.read()
    assert process.returncode == 130 and "stopped: make call 1 again to go on" in told, told
    assert "verdict: 0 met" in told and "verdict: 0 met" in (tmp_path / "verdict.txt").read_text()
    pid = (tmp_path / "slow.txt").read_text().strip()
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    assert [(line["step"], line["ended"]) for line in lines_of(tmp_path, "step")] == [("quick", True)]


def test_what_failed_is_not_tried_again_in_the_same_step_which_then_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / results.FILE))
    tried: list[int] = []

    def measure() -> dict[str, Any]:
        tried.append(1)
        raise RuntimeError("an illegal memory access")

    for token, times, code in (("a", 1, 1), ("a", 1, 1), ("b", 2, 1)):  # started anew; called again
        monkeypatch.setenv("BENCHMARK_TOKEN", token)
        results.attempt("masks", {"what": "window"}, measure)
        with pytest.raises(SystemExit) as ended:
            results.end()
        assert len(tried) == times and ended.value.code == code
    monkeypatch.setenv("BENCHMARK_TOKEN", "c")
    results.attempt("masks", {"what": "window"}, lambda: {"ms": 1.0})
    with pytest.raises(SystemExit) as ended:
        results.end()
    assert ended.value.code == 0


TESTS = """
import time, pytest
def test_good(): pass
@pytest.mark.parametrize("n", range(3))
def test_more(n): assert n != 1, "one is wrong"
def test_slow(): time.sleep(600)
def test_last(): pass
"""


def test_each_test_is_written_at_once_and_what_passed_is_left_out_the_next_time(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    more = {"BENCHMARK_RESULTS": str(tmp_path / results.FILE), "BENCHMARK_STEP": "tests", "BENCHMARK_TEST_SECONDS": "5"}
    words = (*calls.pytest("-n", "2", "--rootdir", str(tmp_path), "-c", os.devnull), str(file))
    done = python(*words, more={**more, "PYTHONPATH": str(ROOT)})
    outcomes = results.outcomes(results.read(tmp_path / results.FILE), "tests")
    by_name = {name.rpartition("::")[2]: outcome for name, outcome in outcomes.items()}
    good = {"test_good": "passed", "test_more[0]": "passed", "test_more[2]": "passed", "test_last": "passed"}
    assert by_name == {**good, "test_more[1]": "failed", "test_slow": "failed"}, done.stdout + done.stderr
    assert (
        "FAILED" in done.stdout and "one is wrong" in done.stdout and "test_slow" in (tmp_path / "hung.txt").read_text()
    )
    file.write_text(TESTS.replace("n != 1", "True").replace("600", "0"))
    again = python(*words, more={**more, "PYTHONPATH": str(ROOT)})
    assert "2 passed" in again.stdout and again.returncode == 0, again.stdout
    assert set(results.outcomes(results.read(tmp_path / results.FILE), "tests").values()) == {"passed"}


def test_nccl_is_told_the_number_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def init(*words: Any, **how: Any) -> None:
        told.update(how)
        raise InterruptedError

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    with pytest.raises(InterruptedError):
        pieces.nccl(small=True)
    assert told["device_id"] == torch.device("cuda", 0), "torch refuses a device without a number"
    assert told["timeout"].total_seconds() <= 60


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
     "step_s": 2.2, "planned_gb": 39.0, "gpu": "NVIDIA H100 80GB HBM3"},
    {"section": "train", "network": "1.3b", "flags": "--compile", "mfu": 52.0, "tflops": 510.0, "memory_gb": 41.0,
     "step_s": 2.0, "planned_gb": 39.0, "gpu": "NVIDIA H100 80GB HBM3"},
    {"section": "train", "network": "llama", "flags": "", "failed": "no memory"},
    {"section": "plain", "network": "1.3b", "step_s": 2.4, "ratio": 1.1},
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
    assert "loop: 1.2 x" in goals.verdict(LINES), "the fastest of the runs, also of those behind the plain loop"


def test_a_verdict_counts_tests_that_failed_when_they_last_ran() -> None:
    failures = goals.failures("tests")
    lines = [{"section": "test", "step": "tests", "test": name, "outcome": "failed"} for name in ("a", "b")]
    assert failures(lines) == 2 and failures([]) is None, "also where the step was ended before its last test"
    lines += [{"section": "test", "step": "tests", "test": "a", "outcome": "passed"}]
    ended = {"section": "step", "step": "tests", "code": 1, "ended": True}
    assert failures([*lines, ended]) == 1 and failures([*lines[:0], {**ended, "code": 0}]) == 0
    assert failures([ended]) == 1, "no test could be run"


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
    results.keep("rates", what="fp8", tflops=1.0)  # behind the line that was cut off
    results.keep("rates", what="fp4", tflops=1.0)
    assert results.done("rates", what="fp8") and results.done("rates", what="fp4") and len(results.read(file)) == 4


def test_what_was_trained_is_not_trained_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path / results.FILE))
    job = Job("1.3b", "", "--layers 1", 1.0)
    assert [work.extra for work in works([job], [[], ["--compile"]])] == [[], None, ["--compile"]]
    results.keep("train", network="1.3b", flags="--compile", mfu=1.0)
    assert works([job], [[], ["--compile"]]) == [Work(job, 0.3, []), Work(job, 0.4, None)]
    others = [Job("1.3b", "", "--layers 1", 0.5), Job("llama", "", "--layers 2", 0.3), Job("llama fp8", "", "", 0.2)]
    order = [(work.job.name, work.extra) for work in works(others, [[], ["-a"], ["-b"]])]
    assert order[:4] == [("1.3b", []), ("1.3b", None), ("llama", []), ("llama fp8", [])], "the most valuable first"
    assert order[4:8] == [("1.3b", ["-b"]), ("llama", ["-b"]), ("llama fp8", ["-b"]), ("llama", None)]
    assert len(order) == 11 and len({(name, str(extra)) for name, extra in order}) == 11


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


def test_kernels_are_timed_by_events_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[tuple[str, int]] = []

    def one_round(work: Any, device: torch.device, number: int) -> timing.Timed:
        rounds.append((device.type, number))
        return timing.Timed(device=float(len(rounds)), host=0.5)

    monkeypatch.setattr(kernels, "one_round", one_round)
    times = kernels.seconds({"some": lambda: None}, 5, 20, "cuda")
    assert rounds == [("cuda", 20)] * 7, "two rounds more, which do not count"
    assert times["some"] == timing.Timed(device=5.0, host=0.5), (
        "the median of the device's time, and the host's beside it"
    )


def test_the_computed_roofline_is_the_sum_of_bytes_and_operations() -> None:
    h100 = {one.way: one for one in roofline.expected(roofline.NETWORKS[0], roofline.MACHINES[0])}
    network = roofline.NETWORKS[0]
    work = 16384 * (24 * 6 * (4 * 2048**2 + 2 * 2048 * 8192) + 6 * 50304 * 2048)
    assert network.tflop == pytest.approx((work + 24 * 6 * 2048 * 2048 * 2048 * 8) / 1e12)
    assert h100["torch's formulas"].mfu == pytest.approx(52.9, abs=0.1)
    assert h100["--compile, Triton loss"].mfu == pytest.approx(56.4, abs=0.1)
    saved = (
        h100["torch's formulas"].ms - h100["a GPU's default kernels"].ms
    )  # seven reads of [tokens, h] a layer, and of AdamW's 38 bytes 8
    parameters = 24 * (4 * 2048**2 + 2 * 2048 * 8192) + 50304 * 2048
    assert saved == pytest.approx((24 * 7 * 2 * 2048 * 16384 + 8 * parameters / 8) / (3.35e9 * 0.87))
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
    lines = {line["way"]: line for line in lines_of(tmp_path, "layer")}
    assert done.returncode == 0 and set(lines) == set(layers.WAYS), done.stdout + done.stderr
    assert not [line for line in results.read(file) if "failed" in line]
    assert {line["way"] for line in lines_of(tmp_path, "profile")} == set(layers.WAYS)
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
        "not launched": "m.CASES['split_qkv'] = {}",
        "does not compile": "m.CASES['rotary'] = {'odd': lambda op: op(m.draw(2, 2, 2, 6), None, None, False)}",
    }[problem]
    code = f"import sys; from benchmarks.gpu import triton_to_sm90 as m; {spoiled}; sys.exit(m.main())"
    done = python("-c", code)
    assert (done.returncode == 0) == (problem == ""), done.stdout[-3000:] + done.stderr[-3000:]
    expected = {
        "": "none spills",
        "spills": "rotary._rotate_token_kernel (rotary 64) spills 0 bytes; -1 are allowed",
        "no case": "rotary has a Triton kernel and no case",
        "not launched": "split_qkv._join_head_gradients_kernel of megatron/core/kernels/triton/split_qkv.py was launched by no case",
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
