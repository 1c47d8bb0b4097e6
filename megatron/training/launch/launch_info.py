"""Where the launcher put this process. Needs no torch, so that a command line can be answered before it is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class LaunchInfo:
    """Where the launcher put this process. local_rank: its number on its machine; store: host:port of the launcher's
    key-value store, or ""; job: its id; attempt: how often the launcher has restarted the ranks. meeting: host:port
    where the ranks rendezvous: the launcher's store, or one that the first rank opens. launch: an id common to all
    starts of the same job, or "". is_launched: torchrun has started this process.
    """

    rank: int
    local_rank: int
    size: int
    store: str
    job: str
    attempt: str = "0"
    meeting: str = ""
    launch: str = ""
    is_launched: bool = False


def read_launch_info() -> LaunchInfo:
    """Return what the launcher's environment variables say."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    meeting = f"{host}:{port}" if host and port else ""
    return LaunchInfo(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        size=world_size(),
        store=meeting if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "",
        job=os.environ.get("SLURM_JOB_ID", ""),
        attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        meeting=meeting,
        launch=_launch_id(),
        is_launched="TORCHELASTIC_RUN_ID" in os.environ,
    )


def _launch_id() -> str:
    """Return an id that restarts of a job share: Slurm's job and step, else torchrun's rendezvous id, else ""."""
    job, rendezvous = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job:
        return f"Slurm {job}.{os.environ.get('SLURM_STEP_ID', '')}"
    return "" if rendezvous == "none" else f"torchrun {rendezvous}"


def has_desktop() -> bool:
    """Return whether this machine has a desktop whose browser can be opened; in a terminal, Python would open a text browser."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")
    )


def world_size() -> int:
    """Return the number of ranks of this job (WORLD_SIZE, else 1)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rendezvous_environment(rank: int, size: int) -> dict[str, str]:
    """Return the environment variables that make a process rank `rank` of `size` at this job's rendezvous."""
    shared = {name: os.environ[name] for name in _RENDEZVOUS if name in os.environ}
    return {**shared, "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": str(size)}


_RENDEZVOUS = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MEGATRON_DEVICE",
)


def environment_with_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of this process's environment with changes, for a child process."""
    return {**os.environ, **changes}


def set_world_size_variable(ranks: int) -> None:
    """Set WORLD_SIZE, so that only the first `ranks` ranks take part in the training layout."""
    os.environ["WORLD_SIZE"] = str(ranks)


def install_interrupt_excepthook() -> None:
    """Install an excepthook: an uncaught Ctrl-C prints one line on the first rank instead of a traceback."""

    def interrupt_excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        elif read_launch_info().rank == 0:
            sys.stderr.write("interrupted (SIGINT)\n")

    sys.excepthook = interrupt_excepthook


# The variables that a run notes down: those that can change numbers or speed, each by its name. A list of what may be told,
# and not of what may not: a secret can have any name (TORCH_AUTH, SLURM_CRED).
_RECORDED_NAMES = {
    "ATEN": "CPU_CAPABILITY",
    "CUBLAS": "WORKSPACE_CONFIG",
    "CUBLASLT": "WORKSPACE_SIZE",
    "CUDA": "CACHE_DISABLE DEVICE_MAX_CONNECTIONS DEVICE_ORDER FORCE_PTX_JIT LAUNCH_BLOCKING MODULE_LOADING SCALE_LAUNCH_QUEUES VISIBLE_DEVICES",
    "DNNL": "DEFAULT_FPMATH_MODE MAX_CPU_ISA",
    "GLOO": "DEVICE_TRANSPORT SOCKET_IFNAME",
    "GOMP": "CPU_AFFINITY SPINCOUNT",
    "KMP": "AFFINITY BLOCKTIME",
    "MEGATRON": "DEVICE STAND_BY",
    "MKL": "CBWR DEBUG_CPU_TYPE DYNAMIC ENABLE_INSTRUCTIONS NUM_THREADS THREADING_LAYER",
    "NCCL": "ALGO ALLOC_P2P_NET_LL_BUFFERS BUFFSIZE CGA_CLUSTER_SIZE COLLNET_ENABLE COMM_BLOCKING CROSS_NIC CUMEM_ENABLE CUMEM_HOST_ENABLE DEBUG "
    "DEBUG_SUBSYS DMABUF_ENABLE GRAPH_MIXING_SUPPORT GRAPH_REGISTER IB_ADAPTIVE_ROUTING IB_AR_THRESHOLD IB_DISABLE IB_GID_INDEX IB_HCA "
    "IB_PCI_RELAXED_ORDERING IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_SPLIT_DATA_ON_QPS IB_TC IB_TIMEOUT IGNORE_CPU_AFFINITY "
    "LAUNCH_MODE LL128_BUFFSIZE LL_BUFFSIZE MAX_CTAS MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE NCHANNELS_PER_NET_PEER NET "
    "NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NSOCKS_PERTHREAD NTHREADS NVLS_CHUNKSIZE NVLS_ENABLE P2P_DISABLE P2P_LEVEL "
    "P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROTO PXN_DISABLE SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME SOCKET_NTHREADS TOPO_FILE TUNER_PLUGIN",
    "NVIDIA": "DRIVER_CAPABILITIES PYTORCH_VERSION TF32_OVERRIDE VISIBLE_DEVICES",
    "NVTE": "ALLOW_NONDETERMINISTIC_ALGO BWD_LAYERNORM_SM_MARGIN FLASH_ATTN FUSED_ATTN FWD_LAYERNORM_SM_MARGIN TORCH_COMPILE UNFUSED_ATTN",
    "OMP": "DYNAMIC MAX_ACTIVE_LEVELS NUM_THREADS PLACES PROC_BIND SCHEDULE WAIT_POLICY",
    "OPENBLAS": "NUM_THREADS",
    "PYTORCH": "ALLOC_CONF CUDA_ALLOC_CONF JIT NO_CUDA_MEMORY_CACHING",
    "SLURM": "ARRAY_JOB_ID ARRAY_TASK_ID CLUSTER_NAME CPUS_ON_NODE CPUS_PER_TASK CPU_BIND GPUS_ON_NODE GPUS_PER_NODE JOB_ID JOB_NAME JOB_NODELIST "
    "JOB_NUM_NODES JOB_PARTITION MEM_PER_CPU MEM_PER_NODE NNODES NTASKS NTASKS_PER_NODE RESTART_COUNT",
    "TORCH": "ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT COMPILE_DISABLE CUDA_ARCH_LIST CUDNN_V8_API_DISABLED DISABLE_SHARE_RDZV_TCP_STORE "
    "DISTRIBUTED_DEBUG LOGS NCCL_ASYNC_ERROR_HANDLING NCCL_AVOID_RECORD_STREAMS NCCL_BLOCKING_WAIT NCCL_ENABLE_MONITORING "
    "NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY NCCL_TRACE_BUFFER_SIZE NCCL_USE_COMM_NONBLOCKING",
    "TORCHDYNAMO": "DISABLE",
    "TORCHELASTIC": "MAX_RESTARTS RESTART_COUNT",
    "TORCHINDUCTOR": "COORDINATE_DESCENT_TUNING FREEZING MAX_AUTOTUNE",
}
_RECORDED_VARIABLES = frozenset(
    {"PYTHONHASHSEED", *(f"{family}_{name}" for family, names in _RECORDED_NAMES.items() for name in names.split())}
)


def recorded_environment_variables() -> dict[str, str]:
    """Return the environment variables that the run log records, with their values."""
    return {name: os.environ[name] for name in sorted(_RECORDED_VARIABLES & os.environ.keys())}
