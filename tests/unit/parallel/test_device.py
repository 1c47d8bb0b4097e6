from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from megatron.core.config.settings.parallel import ParallelConfig
from megatron.core.parallel.device import set_sched_batch_policy
from megatron.core.parallel.mesh import Mesh
from tests.helpers.architecture import ROOT
from tests.helpers.world import Worlds

HELD = """
import json, os, torch
from megatron.core.parallel.device import disable_malloc_trim

def held():  # MB more than before, once a tensor of 40 MB is gone
    size = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    before = size()
    torch.ones(10**7)
    return size() - before

found = [held()]
disable_malloc_trim(torch.device("cpu"))
found.append(held())
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
@pytest.mark.parametrize("told", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_memory_that_tensors_let_go_of_is_used_again_unless_the_environment_says_otherwise(
    told: dict[str, str],
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }
    done = subprocess.run(
        [sys.executable, "-c", HELD], env={**environment, **told}, capture_output=True, text=True, check=True
    )
    before, after = json.loads(done.stdout)
    assert before < 10, "the system has it again"
    assert after < 10 if told else after > 35


def policies_here(device: str) -> tuple[int, int, bool]:
    """How Linux treats this process before and after its mesh is built, and whether it treats a new thread of it alike."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    before = os.sched_getscheduler(0)
    if device == "cpu":
        Mesh.build(ParallelConfig(tensor_model_parallel_size=dist.get_world_size()), torch.device(device))
    else:
        set_sched_batch_policy(torch.device(device))
    after, later = os.sched_getscheduler(0), []
    thread = threading.Thread(target=lambda: later.append(os.sched_getscheduler(0)))
    thread.start()
    thread.join()
    return before, after, later == [after]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the policy")
def test_ranks_on_cpus_compute_in_batches_and_those_on_gpus_do_not(world: Worlds) -> None:
    assert world(2).run(policies_here, "cpu") == [(os.SCHED_OTHER, os.SCHED_BATCH, True)] * 2
    assert world(2).run(policies_here, "cuda") == [(os.SCHED_OTHER, os.SCHED_OTHER, True)] * 2


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the policy")
def test_a_policy_that_was_chosen_or_is_forbidden_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(os, "sched_setscheduler", lambda *given: asked.append(given))
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_IDLE)
    set_sched_batch_policy(torch.device("cpu"))
    assert asked == []

    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    set_sched_batch_policy(torch.device("cpu"))


def test_a_process_does_not_hold_what_the_one_that_started_it_held() -> None:
    child = (
        "import torch; from megatron.core.parallel.device import device_memory_stats; "
        "print(device_memory_stats(torch.device('cpu'))['max allocated'])"
    )
    parent = (
        f"import subprocess, sys; held = bytearray(b'1') * 2**30; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert int(printed) < 2**30, f"{int(printed) / 2**20:.0f} MiB at most, of a process that only imported torch"
