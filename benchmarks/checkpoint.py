"""How fast checkpoints are saved and loaded, beside a raw write and read of the same bytes, torch.save, safetensors and DCP.

    python benchmarks/checkpoint.py FOLDER [--gigabytes 2] [--repeats 3]

All that is written is synced. Every method writes a new file, and its former one is deleted beside the clock: a save that
overwrites the last one is none. Reads find their files in the system's cache, where there is room for them. FOLDER needs
six times the size; what is put there is deleted. Medians; the methods take turns, so that a busy machine is busy for all.
"""

import argparse
import mmap
import os
import shutil
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.checkpoint_folders import SavedRunConfig, checkpoints_to_try
from megatron.core.dist_checkpointing.load import load_into_sharded_state, open_first_valid
from megatron.core.dist_checkpointing.saver import CheckpointSaver, SavePolicy, save

NUM_TENSORS = 300
ABOUT = SavedRunConfig({}, 1)
State = dict[str, torch.Tensor]


def sync(path: Path) -> None:
    """Bring a file to the disk, opened anew as others leave it closed."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def raw_write(state: State, folder: Path) -> None:
    """The tensors' bytes in one file, and nothing else."""
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensor in state.values():
            content = memoryview(tensor.numpy()).cast("B")
            done = 0
            while done < len(content):
                done += file.write(content[done : done + (1 << 24)])
        os.fsync(file.fileno())


def raw_read(target: State, folder: Path) -> None:
    """The same bytes back into the tensors."""
    with open(folder / "raw", "rb", buffering=0) as file:
        for tensor in target.values():
            content = memoryview(tensor.numpy()).cast("B")
            done = 0
            while done < len(content):
                done += file.readinto(content[done:])


def mapped_read(target: State, folder: Path) -> None:
    """The same bytes by way of a mapping."""
    with open(folder / "raw", "rb") as file:
        whole = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.float32)
    place = 0
    for tensor in target.values():
        tensor.copy_(whole[place : place + tensor.numel()].view(tensor.shape))
        place += tensor.numel()


def torch_save(state: State, folder: Path) -> None:
    """torch.save, synced."""
    torch.save(state, folder / "torch.pt")
    sync(folder / "torch.pt")


def torch_load(target: State, folder: Path) -> None:
    """torch.load, copied into place."""
    for name, tensor in torch.load(folder / "torch.pt", weights_only=True).items():
        target[name].copy_(tensor)


def safetensors_save(state: State, folder: Path) -> None:
    """safetensors, synced."""
    safetensors.torch.save_file(state, folder / "model.safetensors")
    sync(folder / "model.safetensors")


def safetensors_load(target: State, folder: Path) -> None:
    """safetensors, mapped, copied into place."""
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        for name, tensor in target.items():
            tensor.copy_(file.get_tensor(name))


def dcp_save(state: State, folder: Path) -> None:
    """torch.distributed.checkpoint of one process, synced."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True), no_dist=True)


def dcp_load(target: State, folder: Path) -> None:
    """torch.distributed.checkpoint of one process, into place."""
    dcp.load(target, checkpoint_id=folder / "dcp", no_dist=True)


def our_save(state: State, folder: Path) -> None:
    """Ours, waiting, hashed and committed."""
    save(dict(state), folder / "ours", 1, ABOUT)


def our_load(target: State, folder: Path) -> None:
    """Ours, every byte verified first."""
    source, _ = open_first_valid(checkpoints_to_try(folder / "ours"))
    load_into_sharded_state(dict(target), source)


def our_load_unverified(target: State, folder: Path) -> None:
    """Ours, as mapped."""
    source, _ = open_first_valid(checkpoints_to_try(folder / "ours"), verified=False)
    load_into_sharded_state(dict(target), source)


WRITERS: dict[str, Callable[[State, Path], None]] = {
    "raw write": raw_write,
    "ours": our_save,
    "torch.save": torch_save,
    "safetensors": safetensors_save,
    "DCP": dcp_save,
}
READERS: dict[str, tuple[Callable[[State, Path], None], str]] = {
    "raw read": (raw_read, "raw write"),
    "raw mapped": (mapped_read, "raw write"),
    "ours, verified": (our_load, "ours"),
    "ours, not verified": (our_load_unverified, "ours"),
    "torch.load": (torch_load, "torch.save"),
    "safetensors": (safetensors_load, "safetensors"),
    "DCP": (dcp_load, "DCP"),
}


def timed(action: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def asynchronous(state: State, folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds that the memory takes, then those that each save blocks training; and seconds to the commits."""
    saver = CheckpointSaver(folder, rules=SavePolicy(asynchronous=True))
    taking = timed(lambda: saver.plan_and_allocate(dict(state)))
    blocked, whole = [taking], []
    for iteration in range(repeats):
        saver.start(dict(state), iteration, ABOUT)
        outcome = saver.finish()
        shutil.rmtree(folder / f"iter_{iteration - 1:07d}", ignore_errors=True)
        assert outcome is not None and not outcome.problems and not outcome.notes, outcome
        blocked.append(outcome.blocked)
        whole.append(outcome.seconds)
    return blocked, whole


def beside_work(state: State, folder: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds that a save blocks training which has work before its next update, and by which that work gets longer."""
    saver, factor = CheckpointSaver(folder, rules=SavePolicy(asynchronous=True)), torch.rand(1024, 1024)

    def work() -> None:
        for _ in range(60):
            factor @ factor @ factor

    saver.plan_and_allocate(dict(state))
    blocked, longer = [], []
    for iteration in range(repeats):
        alone, started = timed(work), time.perf_counter()
        saver.start(dict(state), iteration, ABOUT, until_staged=True)
        work()
        saver.wait_for_staging()
        longer.append(max(0.0, time.perf_counter() - started - alone))
        outcome = saver.finish()
        shutil.rmtree(folder / f"iter_{iteration - 1:07d}", ignore_errors=True)
        assert outcome is not None and not outcome.problems and not outcome.notes, outcome
        blocked.append(outcome.blocked)
    return blocked, longer


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; on the disk that is to be measured")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the state (default: 2)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = int(args.gigabytes * 1e9 / NUM_TENSORS / 4 / 1024)
    state = {f"layer{number}": torch.rand(rows, 1024) for number in range(NUM_TENSORS)}
    size = sum(tensor.nbytes for tensor in state.values()) / 1e9
    times: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        for name, writer in WRITERS.items():
            os.sync()
            path = args.folder / name
            former = path.with_suffix(".former")
            if path.exists():
                path.rename(former)
            path.mkdir()
            times.setdefault(name, []).append(timed(lambda: writer(state, path)))
            shutil.rmtree(former, ignore_errors=True)
    raw, plain = statistics.median(times["raw write"]), statistics.median(times["torch.save"])
    print(
        f"state of {size:.2f} GB in {NUM_TENSORS} tensors, {torch.get_num_threads()} threads of torch, {os.cpu_count()} processors"
    )
    for name in WRITERS:
        seconds = statistics.median(times[name])
        print(
            f"save  {name:<20} {seconds:7.2f} s  {size / seconds:6.2f} GB/s  {raw / seconds:6.1%} of raw   ({', '.join(f'{t:.2f}' for t in times[name])})"
        )
    blocked, whole = asynchronous(state, args.folder / "background", args.repeats)
    later = statistics.median(blocked[1:])
    print(
        f"async takes its memory in {blocked[0]:.3f} s at the start of a run; a save blocks {later:.3f} s ({size / later:.1f} GB/s, 1/{plain / later:.0f} of torch.save); "
        f"committed after {statistics.median(whole):.2f} s"
    )
    blocked, longer = beside_work(state, args.folder / "beside", args.repeats)
    waits, lost = statistics.median(blocked), statistics.median(longer)
    print(
        f"async beside the passes of a step blocks {waits:.3f} s (1/{plain / waits:.0f} of torch.save); with copy, hash and write, which "
        f"share the processors, the step takes {lost:.3f} s longer (1/{plain / max(lost, 1e-9):.0f})"
    )
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    times = {}
    for _ in range(args.repeats):
        for name, (reader, place) in READERS.items():
            times.setdefault(name, []).append(timed(lambda: reader(target, args.folder / place)))
            assert torch.equal(target["layer7"], state["layer7"]), name
            target["layer7"].zero_()
    raw = statistics.median(times["raw read"])
    for name in READERS:
        seconds = statistics.median(times[name])
        print(
            f"load  {name:<20} {seconds:7.2f} s  {size / seconds:6.2f} GB/s  {raw / seconds:6.1%} of raw   ({', '.join(f'{t:.2f}' for t in times[name])})"
        )
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
