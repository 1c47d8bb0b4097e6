"""Ranks that generate, started over Ray."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron.core.config.flags.declare import ConfigError
from megatron.plan.command import parse_training_command
from megatron.rl import settings
from megatron.rl.arguments import num_training_ranks
from megatron.rl.ray_ranks import RayRanks, generation_rank_command, launch_info_with_ray_ranks
from megatron.training.launch.launch_info import read_launch_info
from tests.helpers.policy import RL
from tests.unit.rl.test_train_rl import NETWORK, POLICY, ROOT, environments


def test_a_rank_over_ray_has_the_command_of_a_job_whose_last_ranks_generate() -> None:
    words = "train_rl.py --rl-ray-address auto --rl-generation-ranks 2 --lr 1".split()
    plain = "train_rl.py --rl-generation-ranks 2 --lr 1".split()
    assert generation_rank_command(words) == plain
    assert generation_rank_command(["train_rl.py", "--rl-ray-address=auto", *plain[1:]]) == plain
    # The launcher's 4 ranks all train; a rank that Ray starts is told of 6, of which 4 train.
    assert num_training_ranks(words, 4) == num_training_ranks(plain, 6) == 4
    rl = dataclasses.replace(RL, rl_ray_address="auto", rl_generation_ranks=2)
    assert launch_info_with_ray_ranks(read_launch_info(), rl).size == read_launch_info().size + 2


@pytest.mark.parametrize(
    "words, message",
    [
        ("--rl-ray-address auto", "starts the ranks of --rl-generation-ranks; say how many"),
        ("--rl-ray-address auto --rl-generation-ranks 1", "needs the package ray, which is not installed here"),
        ("--rl-ray-address auto --rl-generation-ranks 1 --rl-ray-seconds 0", "--rl-ray-seconds 0.0 must be positive"),
    ],
)
def test_what_ray_needs_is_asked_before_anything_starts(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda name: None)
    flags = [*NETWORK.split(), *POLICY.split(), "--train-iters", "1", "--langrl-env-config", "x", *words.split()]
    command = parse_training_command(["train_rl.py", *flags, "--grpo-kl-beta", "0"], ranks=1)
    assert any(message in one.says for one in command.unread), command.unread


@pytest.mark.nightly
def test_ray_starts_a_rank_that_generates_what_the_launchers_would(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    path = environments(tmp_path)
    common = (
        f"{NETWORK} {POLICY} --langrl-env-config {path} --train-iters 3 --grpo-kl-beta 0 --rl-generation-ranks 1 --rl-generation-lag 1 "
        "--rl-verify-model-weights-swap"
    )
    answers = {}
    for name, ranks, more in (("launcher", 2, ""), ("ray", 1, "--rl-ray-address local")):
        words = f"{common} --rl-rollout-bank-dir {name} {more}".split()
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            + [str(ROOT / "train_rl.py"), *words],
            cwd=tmp_path,
            env={
                **os.environ,
                "MEGATRON_DEVICE": "cpu",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            },
            text=True,
            capture_output=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("rank 1 of 2 generates on" in done.stdout) == (name == "ray")
        answers[name] = (tmp_path / name / "samples.jsonl").read_text()
    assert answers["ray"] == answers["launcher"] and answers["ray"].count("\n") == 3 * 8


def test_ray_needs_a_launcher_where_all_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    place = dataclasses.replace(read_launch_info(), meeting="")
    with pytest.raises(ConfigError, match="start with torchrun"):
        RayRanks(dataclasses.replace(RL, rl_ray_address="local", rl_generation_ranks=1), place, [], on_gpu=False)


class _LocalRay(ModuleType):
    """What is used of Ray's interface, with actors in this process: their methods run when their results are asked for."""

    class exceptions:
        class GetTimeoutError(Exception):
            """As Ray's."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.initialized: dict[str, Any] = {}
        self.is_shut_down = False

    def init(self, **options: Any) -> None:
        self.initialized = options

    def remote(self, **_: int) -> Callable[[type], Any]:
        def actor_of(cls: type) -> Any:
            def new() -> Any:
                one = cls()
                methods = [name for name in vars(cls) if not name.startswith("__")]
                return SimpleNamespace(
                    **{name: SimpleNamespace(remote=partial(partial, getattr(one, name))) for name in methods}
                )

            return SimpleNamespace(remote=new)

        return actor_of

    def get(self, calls: Sequence[Callable[[], Any]], timeout: float = 0) -> list[Any]:
        return [call() for call in calls]

    def shutdown(self) -> None:
        self.is_shut_down = True


def _ranks_over(ray: _LocalRay, program: str, monkeypatch: pytest.MonkeyPatch) -> RayRanks:
    """Two ranks that run a program of Python, where the launcher has started two others."""
    monkeypatch.setitem(sys.modules, "ray", ray)
    rl = dataclasses.replace(RL, rl_ray_address="local", rl_generation_ranks=2)
    place = dataclasses.replace(read_launch_info(), meeting="localhost:1", size=2)
    return RayRanks(rl, place, ["-c", program], on_gpu=False)


def test_ranks_over_ray_are_planned_on_their_nodes_and_run_to_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = _LocalRay()
    program = (
        f"import os, pathlib; pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])"
    )
    ranks = _ranks_over(ray, program, monkeypatch)
    node = os.uname().nodename
    assert ranks.plan == [f"rank {rank} of 4 generates on {node}, over Ray" for rank in (2, 3)]
    ranks.wait()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"2": "4", "3": "4"}
    assert ray.is_shut_down and ray.initialized["address"] is None


def test_a_rank_over_ray_that_fails_ends_the_job_with_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = _ranks_over(_LocalRay(), "raise SystemExit('no room for the cache')", monkeypatch)
    with pytest.raises(RuntimeError, match="ended with code 1:\nno room for the cache"):
        ranks.wait()
