"""Metrics: what is averaged over what, and the exact lines that other programs parse."""

import dataclasses
import math
from datetime import datetime
from typing import Any

import pytest
import torch

from megatron.training.report.metrics import (
    ExpertLoads,
    FlopsPerSample,
    IntervalReport,
    StepMetrics,
    StepMetricsMeter,
    Throughput,
    interval_log_line,
    known_peak_tflops,
    memory_line,
    progress_file_line,
    theoretical_memory_line,
    time_left_line,
    unskipped_losses,
    validation_text,
)

NOW = datetime(2024, 9, 3, 15, 54, 54)


def step(iteration, loss=None, **fields):
    losses = {} if loss is None else {"lm loss": torch.tensor(loss)}
    return StepMetrics(
        iteration=iteration, consumed_samples=8 * iteration, batch_size=8, learning_rate=1e-4, losses=losses, **fields
    )


def same(tensor):
    return tensor


def test_a_steps_loss_is_the_mean_over_all_tokens_of_all_ranks():
    other = torch.tensor([30.0, 3.0, 8.0, 2.0], dtype=torch.float64)
    meter = StepMetricsMeter(lambda mine: mine + other)
    meter.add(step(1, [10.0, 1.0]))
    meter.add(step(2, [4.0, 2.0]))
    assert [point.losses["lm loss"] for point in meter.resolve()] == [10.0, 3.0]


def test_token_counts_beyond_the_precision_of_fp32_are_added_exactly():
    meter = StepMetricsMeter(lambda mine: mine + 1.0)
    meter.add(step(1, [0.0, 2.0**24]))
    (point,) = meter.resolve()
    assert 1.0 / point.losses["lm loss"] == pytest.approx(2.0**24 + 1, abs=0.1)


def test_all_steps_are_reduced_at_once_and_only_when_asked():
    calls = []
    meter = StepMetricsMeter(lambda tensor: calls.append(tensor.shape) or tensor)
    for iteration in range(1, 6):
        meter.add(step(iteration, [2.0, 1.0]))
    assert calls == []
    meter.resolve()
    assert calls == [(10,)]
    assert meter.resolve() == []


def test_a_stage_without_losses_reduces_nothing():
    def fail(tensor):
        raise AssertionError("no loss here, so no collective")

    meter = StepMetricsMeter(fail)
    meter.add(step(1, grad_norm=torch.tensor(2.0)))
    assert meter.resolve()[0].grad_norm == 2.0


def test_every_tensor_becomes_the_plain_number_of_its_own_step():
    meter = StepMetricsMeter(same)
    meter.add(
        step(1, [2.0, 1.0], grad_norm=torch.tensor(0.5), loss_scale=torch.tensor([8.0]), skipped=torch.tensor(True))
    )
    meter.add(step(2, [3.0, 1.0], grad_norm=0.25, num_zeros=torch.tensor(2**40 + 1), params_norm=torch.tensor(7.0)))
    first, second = meter.resolve()
    assert (first.grad_norm, first.loss_scale, first.skipped, first.num_zeros) == (0.5, 8.0, True, None)
    assert (second.grad_norm, second.num_zeros, second.params_norm, second.skipped) == (0.25, 2.0**40 + 1, 7.0, False)
    assert type(first.skipped) is bool and type(second.num_zeros) is float


def test_the_interval_averages_steps_that_were_not_skipped():
    meter = StepMetricsMeter(same)
    meter.add(step(1, [2.0, 1.0]))
    meter.add(step(2, [math.inf, 1.0], skipped=True))
    meter.add(step(3, [40.0, 10.0]))
    meter.add(step(4, [50.0, 1.0], skipped=True))
    meter.resolve()
    report = meter.report(train_iters=10, seconds=2.0)
    assert report.losses == {"lm loss": 3.0}
    assert (report.skipped_iterations, report.nan_iterations, report.seconds_per_iteration) == (2, 1, 0.5)
    assert report.last.iteration == 4


def test_figures_of_the_data_count_in_skipped_steps_too():
    meter = StepMetricsMeter(same)
    for iteration, reward, skipped in ((1, 0.5, False), (2, 1.0, True)):
        losses = {"lm loss": torch.tensor([2.0, 1.0]), "reward": torch.tensor([reward, 1.0])}
        one = step(iteration, skipped=skipped)
        meter.add(dataclasses.replace(one, losses=losses, data_figures=("reward",)))
    first, second = meter.resolve()
    assert unskipped_losses(first) == {"lm loss": 2.0, "reward": 0.5} and unskipped_losses(second) == {"reward": 1.0}
    assert meter.report(train_iters=10, seconds=2.0).losses == {"lm loss": 2.0, "reward": 0.75}


def test_an_interval_spans_several_resolves_and_then_begins_anew():
    meter = StepMetricsMeter(same)
    for iteration, loss in ((1, 1.0), (2, 3.0)):
        meter.add(step(iteration, [loss, 1.0]))
        meter.resolve()
    assert meter.report(train_iters=10, seconds=1.0).losses == {"lm loss": 2.0}
    meter.add(step(3, [9.0, 1.0]))
    with pytest.raises(AssertionError, match="resolved"):
        meter.report(train_iters=10, seconds=1.0)
    meter.resolve()
    assert meter.report(train_iters=10, seconds=1.0).losses == {"lm loss": 9.0}


def test_an_interval_of_skipped_steps_has_no_loss():
    meter = StepMetricsMeter(same)
    meter.add(step(1, [math.nan, 1.0], skipped=True))
    meter.resolve()
    report = meter.report(train_iters=10, seconds=1.0)
    assert report.losses == {} and "lm loss" not in interval_log_line(report, NOW)


def test_a_nan_loss_is_shown_and_not_hidden():
    meter = StepMetricsMeter(same)
    meter.add(step(1, [math.nan, 1.0]))
    meter.resolve()
    report = meter.report(train_iters=10, seconds=1.0)
    assert " | lm loss: NAN | " in interval_log_line(report, NOW)
    assert report.nan_iterations == 1


LAST = StepMetrics(
    iteration=20,
    consumed_samples=20480,
    batch_size=1024,
    learning_rate=6.976744e-7,
    losses={"lm loss": 10.0},
    loss_scale=262144.0,
    grad_norm=47.0212,
)
REPORT = IntervalReport(
    last=LAST,
    train_iters=500000,
    skipped_samples=0,
    seconds_per_iteration=12.1379,
    losses={"lm loss": 10.64275},
    skipped_iterations=5,
    nan_iterations=0,
)


def test_the_log_line_is_one_that_megatron_printed():
    """The expected text is a line of a published Megatron-LM log, without its throughput field, and with the digits that newer ones have."""
    assert interval_log_line(REPORT, datetime(2024, 9, 3, 15, 56, 55, 123456)) == (
        " [2024-09-03 15:56:55.123456] iteration       20/  500000 | consumed samples:        20480 | elapsed time per iteration"
        " (ms): 12137.9 | learning rate: 6.976744E-07 | global batch size:  1024 | lm loss: 1.064275E+01 | loss scale: "
        "262144.0 | grad norm: 47.021 | number of skipped iterations:   5 | number of nan iterations:   0 |"
    )


def test_the_full_log_line_has_every_field_in_megatrons_order_and_ours_behind():
    last = dataclasses.replace(LAST, num_zeros=57219176.0, params_norm=315.0231, decoupled_learning_rate=1e-3)
    report = dataclasses.replace(
        REPORT,
        last=last,
        skipped_samples=64,
        losses={"lm loss": 10.64275, "z_loss": 0.5},
        throughput=Throughput(84.4, 172800.0, 445.05, 494.5, peak=989.0),
    )
    names = [part.split(":")[0].strip() for part in interval_log_line(report, NOW).rstrip(" |").split(" | ")[1:]]
    assert names == [
        "consumed samples",
        "skipped samples",
        "elapsed time per iteration (ms)",
        "throughput per GPU (TFLOP/s/GPU)",
        "learning rate",
        "decoupled learning rate",
        "global batch size",
        "lm loss",
        "z_loss",
        "loss scale",
        "grad norm",
        "num zeros",
        "params norm",
        "number of skipped iterations",
        "number of nan iterations",
        "tokens per second",
        "MFU",
    ]
    line = interval_log_line(report, NOW)
    for field in (
        " | skipped samples:           64 | ",
        " | throughput per GPU (TFLOP/s/GPU): 445.1 | ",
        " | num zeros: 57219176.0 | ",
        " | params norm: 315.023 | ",
        " | tokens per second: 172800.0 | ",
        " | MFU: 45.0% causal, 50.0% square, of 989 TFLOP/s |",
    ):
        assert field in line


@pytest.mark.parametrize(
    "tflops, shown",
    [(445.05, "445.1"), (1.0, "1.0"), (0.14, "0.1"), (0.0512, "0.051"), (0.0004567, "0.00046"), (0.0, "0.0")],
)
def test_a_small_throughput_is_a_number_and_not_zero(tflops: float, shown: str) -> None:
    report = dataclasses.replace(REPORT, throughput=Throughput(1.0, 2.0, tflops, tflops))
    assert f" | throughput per GPU (TFLOP/s/GPU): {shown} | " in interval_log_line(report, NOW)
    line = progress_line(1, job_tflops=tflops, total_flops=1.0, total_tokens=1)
    assert f"\tJob throughput: {shown} TFLOP/s/GPU\t" in line


def test_the_companion_of_the_log_line_says_when_the_run_ends() -> None:
    meter = StepMetricsMeter(same)
    meter.add(step(1))
    meter.add(dataclasses.replace(step(2), batch_size=32))
    meter.resolve()
    report = meter.report(train_iters=9, seconds=5.0, samples_left=32 * 800, seq_length=1000)
    assert (report.samples_left, report.tokens_left, report.seconds_left) == (25600, 25600000, 25600 * 5.0 / 40)
    assert (
        time_left_line(report, datetime(2024, 9, 3, 23, 30))
        == " ETA: 2024-09-04 00:23:20, in 0:53:20 | tokens left: 25600000 |"
    )
    last = dataclasses.replace(report, samples_left=0, tokens_left=0, seconds_left=0.0)
    assert time_left_line(last, NOW) is None


def test_mfu_is_left_out_where_the_peak_is_unknown():
    report = dataclasses.replace(REPORT, throughput=Throughput(1.0, 2.0, 3.0, 4.0))
    assert "MFU" not in interval_log_line(report, NOW)


def test_loads_of_experts_are_added_over_ranks_before_their_figures_are_made():
    mine = torch.tensor([[0, 0, 0, 0, 0], [4, 0, 0, 0, 1], [3, 1, 2, 2, 0]])
    theirs = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 4, 0, 1], [1, 1, 2, 4, 0]])
    meter = StepMetricsMeter(lambda flat: flat + torch.cat((torch.tensor([6.0, 2.0]), theirs.flatten().double())))
    meter.add(step(1, [2.0, 2.0], loads=ExpertLoads(mine, by_layer=True)))
    (point,) = meter.resolve()
    found = point.losses
    assert point.loads is None and found["lm loss"] == 2.0
    assert (
        found["moe/load_max_over_mean_layer_1"] == 4 * 4 / 8 and found["moe/load_max_over_mean_layer_2"] == 4 * 6 / 16
    )
    assert found["moe/load_max_over_mean"] == (2.0 + 1.5) / 2
    assert found["moe/load_entropy_layer_1"] == pytest.approx(0.5), "two of four experts, evenly"
    assert found["moe/dropped"] == (2 / 8 + 0.0) / 2
    assert [found[f"moe/load_layer_2_expert_{expert}"] for expert in range(4)] == [4 / 16, 2 / 16, 4 / 16, 6 / 16]
    assert not any("layer_0" in name for name in found), "a layer without experts says nothing"


def test_the_log_line_has_losses_of_layers_and_leaves_figures_of_loads_to_the_boards():
    meter = StepMetricsMeter(same)
    meter.add(
        dataclasses.replace(
            step(1, [2.0, 1.0], loads=ExpertLoads(torch.ones(1, 3, dtype=torch.int64), by_layer=False)),
            losses={
                "lm loss": torch.tensor([2.0, 1.0]),
                "load_balancing_loss": torch.tensor([2.5, 2.0]),
                "moe/load_balancing_loss_layer_0": torch.tensor([2.5, 2.0]),
            },
        )
    )
    (point,) = meter.resolve()
    line = interval_log_line(meter.report(train_iters=1, seconds=1.0), NOW)
    assert "| lm loss: 2.000000E+00 | load_balancing_loss: 1.250000E+00 | loss scale" in line
    assert point.losses["moe/load_balancing_loss_layer_0"] == 1.25 and point.losses["moe/load_max_over_mean"] == 1.0


def test_throughput_counts_the_samples_of_the_whole_interval():
    work = FlopsPerSample(seq_length=1000, causal_flops=2e12, square_flops=3e12, num_devices=4, peak=10.0)
    meter = StepMetricsMeter(same)
    meter.add(step(1))
    meter.add(dataclasses.replace(step(2), batch_size=32))
    meter.resolve()
    speed = meter.report(train_iters=2, seconds=5.0, work=work).throughput
    assert speed == Throughput(
        samples_per_second=8.0, tokens_per_second=8000.0, causal_tflops=4.0, square_tflops=6.0, peak=10.0
    )


@pytest.mark.parametrize(
    "name, dtype, peak",
    [
        ("NVIDIA H200", "bfloat16", 989.0),
        ("NVIDIA H20", "bfloat16", 148.0),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("NVIDIA H100 PCIe", "float16", 756.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("NVIDIA GB200", "bfloat16", 2500.0),
        ("NVIDIA H200", "float32", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_peaks_are_known_for_common_devices_only(name, dtype, peak):
    assert known_peak_tflops(name, dtype) == peak


def test_the_validation_text_is_megatrons():
    line = " validation loss at iteration 1000 on test set | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
    assert validation_text({"lm loss": math.log(10)}, "iteration 1000 on test set").split("\n") == [
        "-" * (len(line) + 1),
        line,
        "-" * (len(line) + 1),
    ]
    assert f"PPL: {math.exp(20):.6E} |" in validation_text({"lm loss": 30.0}, "iteration 5")
    answers = validation_text(
        {"preference loss": 0.5, "preference accuracy": 0.75, "reward margin": 2.0}, "iteration 5"
    )
    assert "preference accuracy value: 7.500000E-01 | reward margin value" in answers and "PPL" not in answers


def test_the_memory_lines_are_megatrons():
    memory = {
        "allocated": 1048576 * 1.5,
        "max allocated": 1048576 * 2,
        "reserved": 1048576 * 3,
        "max reserved": 1048576 * 4,
    }
    assert memory_line(3, 20, memory) == (
        "[Rank 3] (after 20 iterations) memory (MB) | allocated: 1.50 | max allocated: "
        "2.00 | reserved: 3.00 | max reserved: 4.00"
    )
    assert theoretical_memory_line(1048576 * 18, 1048576 * 2.5) == (
        "Theoretical memory footprints: weight and optimizer=18.00 MB, activation=2.50 MB, total=20.50 MB"
    )


def progress_line(iteration: int, **figures: Any) -> str:
    """A line of progress.txt for a checkpoint."""
    return progress_file_line("Saved checkpoint", now=NOW, job_id="77", num_devices=8, iteration=iteration, **figures)


def test_progress_lines_are_tab_separated():
    assert progress_line(50, job_tflops=400.04, total_flops=1.25e21, total_tokens=12_340_000_000) == (
        "2024-09-03 15:54:54\tJob ID: 77\t# GPUs: 8\tSaved checkpoint\tIteration: 50\tJob throughput: 400.0 TFLOP/s/GPU\t"
        "Floating-point operations: 1.25e+21\tTokens (in billions): 12.34\n"
    )
