from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

HELD = """
import json, os, torch
from megatron.core.parallel.device import keep_freed_memory

def held():  # MB more than before, once a tensor of 40 MB is gone
    size = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    before = size()
    torch.ones(10**7)
    return size() - before

found = [held()]
keep_freed_memory(torch.device("cpu"))
found.append(held())
print(json.dumps(found))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep memory")
@pytest.mark.parametrize("told", [{}, {"MALLOC_MMAP_THRESHOLD_": "65536"}])
def test_memory_that_tensors_let_go_of_is_used_again_unless_the_environment_says_otherwise(told: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", HELD], env={**environment, **told}, capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert before < 10, "the system has it again"
    assert after < 10 if told else after > 35
