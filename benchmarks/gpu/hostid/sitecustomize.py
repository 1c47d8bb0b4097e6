"""Every process says to NCCL that it is a host of its own, so that several ranks may share one GPU: PYTHONPATH=benchmarks/gpu/hostid.

It is for ranks that Python starts; a rank that is forked, as the tests' are, gets an identity of its own as well.
"""

from __future__ import annotations

import os


def own_host() -> None:
    """Set what NCCL reads when it makes its first group."""
    os.environ.update(
        NCCL_HOSTID=f"process{os.getpid()}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_ALGO="Ring",
        NCCL_PROTO="Simple",
    )


own_host()
os.register_at_fork(after_in_child=own_host)
