"""Checkpoint folders: committed, newest and expired checkpoints. Plain files and JSON; needs no torch.

    SAVE/latest_checkpointed_iteration.txt    the newest iteration, as a number: a hint for people and other programs
    SAVE/best                                 link to the checkpoint of the best evaluation (--save-best)
    SAVE/iter_0001000/                        one checkpoint; the folder has this name only when it is complete
        rank_00000.safetensors, ...           tensors, a file for each rank that wrote (see rank_file.py)
        manifest.json                         where every shard of every tensor is stored, with its hash (see manifest.py)
        config.json                           the settings of the run, for people and for --use-checkpoint-args
        commit.txt                            hashes of the manifest and the config; the last file to be written
    SAVE/iter_0001100.1f0c88ab.tmp/           a checkpoint that is being written, or was never finished
    SAVE/iter_0001000.old/                    the former checkpoint of an iteration that is saved again; still valid
    SAVE/iter_0000900.gone/                   one that is being deleted
    SAVE/writer.lock                          the job that writes here (see lock.py)

A save fills a folder under another name, makes every byte durable, and renames it: a folder with the final name is complete.
If a save dies at any moment, that folder is the former checkpoint or the new one, complete. Remains are harmless, and the next
save removes them. Every byte is hashed: commit.txt by its own last line, manifest and config by commit.txt, and the data files,
headers included, by the manifest.

The newest checkpoint is the one committed last, not the one with the highest iteration: a run that resumes from an earlier
checkpoint writes lower iterations than those it abandoned. Only one rank calls the functions that write here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron.core.config.flags.declare import flag_fields, raise_config_error_if
from megatron.core.config.settings.data import TokenizerConfig, resumed_null_vocab_size
from megatron.core.config.settings.model import ModelConfig
from megatron.core.dist_checkpointing.files import DISK, FileSystem, read_file, remove_tree, write_and_fsync_file

FORMAT_VERSION = 2
TRACKER, BEST = "latest_checkpointed_iteration.txt", "best"
COMMIT, MANIFEST, CONFIG = "commit.txt", "manifest.json", "config.json"
_FIRST_LINE = "megatron boxes"
_STEP = re.compile(r"iter_(\d{7,})(\.old)?")
_REMAINS = re.compile(r"(iter_\d{7,})\.(?:[0-9a-f]{1,8}\.)?(tmp|old|gone)")
_SHOWN = 100  # problems an error prints; a wrong model misses thousands of names

# What a user may choose anew for a checkpoint's model: kernels, dropout, initial values, and the padding of this layout.
FREE = frozenset(
    """
    attention_backend kernel cross_entropy_fusion_impl hidden_dropout attention_dropout init_method_std
    embedding_init_method_std init_method_xavier_uniform make_vocab_size_divisible_by padded_vocab_size
    fp32_residual_connection
    """.split()
)


class CheckpointError(Exception):
    """A checkpoint cannot be written or read. The message lists all problems."""

    def __init__(self, summary: str, problems: Sequence[str] = ()) -> None:
        super().__init__(summary, tuple(problems))  # both, so that the error survives the way to other ranks
        self.summary, self.problems = summary, tuple(problems)

    def __str__(self) -> str:
        formatted = [f"  {problem}" for problem in self.problems[:_SHOWN]]
        if len(self.problems) > _SHOWN:
            formatted.append(f"  ... and {len(self.problems) - _SHOWN} more")
        return "\n".join([self.summary, *formatted])


class NewerFormatError(CheckpointError):
    """A checkpoint is of a newer program than this one, and not damaged: nothing older is taken in its place."""


@dataclass(frozen=True, slots=True)
class SavedRunConfig:
    """The content of config.json: the resolved settings of the run that saved, by field name, and its number of ranks."""

    values: Mapping[str, Any]
    world_size: int


@dataclass(frozen=True, slots=True)
class FileSizeAndHash:
    """Expected size and hash of a file."""

    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The content of commit.txt. save: id of this save, in each of its files; sequence: grows with every commit."""

    save: str
    iteration: int
    sequence: int
    manifest: FileSizeAndHash
    config: FileSizeAndHash

    def text(self) -> str:
        """Return the content of commit.txt; its last line is the hash of the others."""
        lines = [
            f"{_FIRST_LINE} {FORMAT_VERSION}",
            f"save {self.save}",
            f"iteration {self.iteration}",
            f"sequence {self.sequence}",
            *(
                f"{name} {committed.size} {committed.hash}"
                for name, committed in ((MANIFEST, self.manifest), (CONFIG, self.config))
            ),
        ]
        body = "".join(line + "\n" for line in lines)
        return f"{body}seal {xxh3_hex_digest(body.encode())}\n"


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    folder: Path
    commit: CommitRecord

    @property
    def iteration(self) -> int:
        """Number of steps that the run had done."""
        return self.commit.iteration


@dataclass(frozen=True, slots=True)
class CheckpointFolderScan:
    """The checkpoints in a folder. steps: newest first. damaged: (iteration, reason) of those without valid commit; newer: of
    those of a newer format.
    """

    steps: tuple[CommittedCheckpoint, ...]
    damaged: tuple[tuple[int, str], ...]
    newer: tuple[tuple[int, str], ...] = ()

    def require_no_newer_format(self, step: int | None = None) -> None:
        """Raise `NewerFormatError` if a checkpoint is of a newer format. step: if this iteration is."""
        if newer := [text for iteration, text in self.newer if step in (None, iteration)]:
            raise NewerFormatError("a newer program has saved here; use that one, or another folder", newer)


def xxh3_hex_digest(content: bytes | memoryview) -> str:
    """Return the xxh3 hash of bytes as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


def iteration_folder(folder: str | Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint."""
    return Path(folder) / f"iter_{iteration:07d}"


def check_save_folder_writable(folder: str | Path) -> None:
    """Raise `ConfigError` if no file can be created in a `--save` folder; the folder is created."""
    try:
        DISK.make_folder(Path(folder), durable=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise_config_error_if([_not_writable_message(folder, error.strerror or str(error))])


def unwritable_reason(folder: str | Path) -> str:
    """Return why no file can be created in a `--save` folder, without creating the folder; "" if no reason is found."""
    there = next(
        parent for parent in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(parent)
    )
    if not there.is_dir():
        return _not_writable_message(folder, f"{there} is no folder")
    return "" if os.access(there, os.W_OK | os.X_OK) else _not_writable_message(folder, os.strerror(errno.EACCES))


def _not_writable_message(folder: str | Path, reason: str) -> str:
    """Return the message that a `--save` folder cannot be written."""
    return f"--save {folder} cannot be written: {reason}; give a folder that this user may write"


def scan_checkpoint_folder(folder: str | Path, *, files: FileSystem = DISK) -> CheckpointFolderScan:
    """Return everything in a folder that is named like a checkpoint; empty if there is no folder."""
    steps, damaged, newer = [], [], []
    for iteration, path in _checkpoint_folders(folder, files):
        try:
            commit = read_commit_record(path, files=files)
            if commit.iteration != iteration:
                raise CheckpointError(f"{path} was renamed: its {COMMIT} says iteration {commit.iteration}")
            steps.append(CommittedCheckpoint(path, commit))
        except NewerFormatError as error:
            newer.append((iteration, str(error)))
        except CheckpointError as error:
            damaged.append((iteration, str(error)))
    steps.sort(key=lambda step: (step.commit.sequence, step.iteration), reverse=True)
    return CheckpointFolderScan(tuple(steps), tuple(sorted(damaged, reverse=True)), tuple(sorted(newer, reverse=True)))


def newest_iteration(folder: str | Path, step: int | None = None) -> int | None:
    """Return the iteration committed last; None in a folder without checkpoints. `NewerFormatError` if it holds one of a
    newer format. step: only iteration `step` is to be loaded (`--ckpt-step`), and others may be of one.
    """
    scan = scan_checkpoint_folder(folder)
    scan.require_no_newer_format(step)
    return next((one.iteration for one in scan.steps), None)


def tracker_iteration(folder: str | Path, *, files: FileSystem = DISK) -> int | None:
    """Return the iteration that the tracker file names, if any."""
    try:
        return int(read_file(files, Path(folder) / TRACKER))
    except (OSError, ValueError):
        return None


def checkpoints_to_try(
    folder: str | Path, step: int | None = None, *, required: int | None = None, files: FileSystem = DISK
) -> list[CommittedCheckpoint]:
    """Return the checkpoints to try to load, newest first; empty in a folder without checkpoints.

    step: only this iteration (`--ckpt-step`). required: the newest must be this iteration (`--require-iteration`).
    Raises `CheckpointError` if these do not exist, if one is of a newer format, or if the folder has lost its checkpoints.
    """
    result = scan_checkpoint_folder(folder, files=files)
    result.require_no_newer_format(step)
    if step is None and required is None:
        if not result.steps:
            _require_checkpoints_not_lost(folder, [text for _, text in result.damaged], files)
        return list(result.steps)
    tried = result.steps[:1] if step is None else result.steps
    if chosen := [one for one in tried if one.iteration == (required if step is None else step)]:
        return chosen
    lacking = (
        f"--ckpt-step {step}: {folder} has no complete checkpoint of that iteration"
        if step is not None
        else f"--require-iteration {required}: the newest complete checkpoint in {folder} is not of that iteration"
    )
    complaints = [text for iteration, text in result.damaged if iteration in (step, required)]
    iterations = sorted(one.iteration for one in result.steps)
    raise CheckpointError(f"{lacking}; it has: {', '.join(map(str, iterations)) or 'none'}", complaints)


def _require_checkpoints_not_lost(folder: str | Path, damaged: Sequence[str], files: FileSystem) -> None:
    """Raise `CheckpointError` if a folder without complete checkpoints once had some."""
    if damaged:
        raise CheckpointError(f"{folder} holds no complete checkpoint", damaged)
    if any(entry.name == TRACKER for entry in _list_folder(folder, files)):
        raise CheckpointError(
            f"{Path(folder) / TRACKER} names a checkpoint, but {folder} holds no complete one; put the "
            f"iter_... folder back, or remove {TRACKER} to start afresh"
        )


def temporary_save_path(folder: str | Path, iteration: int, save: str) -> Path:
    """Return the folder into which a save writes; its name contains the save's id, so that no other save writes there."""
    return iteration_folder(folder, iteration).with_suffix(f".{save[:8]}.tmp")


def begin_save(folder: str | Path, iteration: int, save: str, *, files: FileSystem = DISK) -> Path:
    """Create the temporary folder of a save; every rank may call it."""
    made = temporary_save_path(folder, iteration, save)
    try:
        files.make_folder(Path(folder), durable=True)
        files.make_folder(made, durable=False)
    except OSError as error:
        raise CheckpointError(f"{made} cannot be made: {error.strerror or error}") from None
    return made


def remove_interrupted_saves(folder: str | Path, *, save: str = "", files: FileSystem = DISK) -> None:
    """Delete what interrupted saves and deletions left; restore the former checkpoint of an iteration whose new one is
    missing. save: id of the save in progress, whose files stay.
    """
    try:
        entries = files.list_entries(Path(folder))
    except OSError:
        return  # the next write here reports why
    names = {entry.name for entry in entries if entry.is_folder and not entry.is_link}
    for name in sorted(names):
        path, match = Path(folder) / name, _REMAINS.fullmatch(name)
        try:
            if match and match[2] == "old" and match[1] not in names:
                files.rename(path, path.with_name(match[1]))
                files.sync_folder(Path(folder))
            elif match and not (save and name.endswith(f".{save[:8]}.tmp")):
                # Under another name first: a commit that comes meanwhile, of a job that nobody should have started, finds nothing
                # to rename, instead of a folder that loses its files one by one.
                _remove_tree_or_link(path, files) if match[2] == "gone" else _delete_checkpoint(path, files)
        except OSError:
            pass  # it is inert


def commit_save(
    folder: str | Path,
    iteration: int,
    *,
    save: str,
    manifest: bytes,
    sizes: Mapping[str, int],
    description: SavedRunConfig,
    files: FileSystem = DISK,
) -> tuple[CommittedCheckpoint, str]:
    """Declare the save of `iteration` complete: it becomes the newest checkpoint.

    All data files must be written and durable. sizes: their expected bytes. Returns the checkpoint, and a problem with
    the tracker file, usually "". Raises `CheckpointError` if sizes differ or a file cannot be written.
    """
    target = iteration_folder(folder, iteration)
    made, former = temporary_save_path(folder, iteration, save), target.with_suffix(".old")
    config = _json_file_bytes({"world_size": description.world_size, "values": dict(description.values)})
    sequence = 1 + max((step.commit.sequence for step in scan_checkpoint_folder(folder, files=files).steps), default=0)
    done = CommitRecord(
        save,
        iteration,
        sequence,
        FileSizeAndHash(len(manifest), xxh3_hex_digest(manifest)),
        FileSizeAndHash(len(config), xxh3_hex_digest(config)),
    )
    try:
        _require_file_sizes(made, sizes, files)
        for name, content in ((MANIFEST, manifest), (CONFIG, config), (COMMIT, done.text().encode())):
            write_and_fsync_file(files, made / name, content)
        files.sync_folder(made)
        replaces = any(entry.name == target.name for entry in files.list_entries(Path(folder)))
        if replaces:  # the same iteration, saved again after going back; until the next rename its other name counts
            _require_replaceable(target, files)
            files.rename(target, former)
        files.rename(made, target)
        files.sync_folder(Path(folder))
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of iteration {iteration} cannot be completed in {folder}: {error}"
        ) from None
    try:
        if replaces:
            _delete_checkpoint(former, files)
        hint = Path(folder) / TRACKER
        write_and_fsync_file(files, hint.with_suffix(".tmp"), f"{iteration}\n".encode())
        files.rename(hint.with_suffix(".tmp"), hint)
        files.sync_folder(Path(folder))
    except OSError as error:
        return CommittedCheckpoint(target, done), f"{TRACKER} in {folder} is not up to date: {error}"
    return CommittedCheckpoint(target, done), ""


def _require_replaceable(folder: Path, files: FileSystem) -> None:
    """Raise `NewerFormatError` if a checkpoint is of a newer program, whose work an older one does not replace."""
    try:
        read_commit_record(folder, files=files)
    except NewerFormatError:
        raise
    except CheckpointError:
        pass  # a damaged one is replaced


def _require_file_sizes(made: Path, sizes: Mapping[str, int], files: FileSystem) -> None:
    """Raise `CheckpointError` if a data file is missing or has another size than was written."""
    there = {entry.name for entry in files.list_entries(made) if not entry.is_folder}
    result = {name: files.size(made / name) if name in there else None for name in sizes}
    wrong = [
        f"{name} has {'gone' if result[name] is None else f'{result[name]} bytes'}, where {size} were written"
        for name, size in sizes.items()
        if result[name] != size
    ]
    if wrong:
        raise CheckpointError(
            f"{made} is not what the ranks have written; does another job write into this folder?", wrong
        )


def abandon_save(folder: str | Path, iteration: int, save: str, *, files: FileSystem = DISK) -> None:
    """Give up a save and delete its files, as far as possible."""
    try:
        remove_tree(files, temporary_save_path(folder, iteration, save))
    except OSError:
        pass  # it is inert, and the next save tries again


def iteration_of_best_link(folder: str | Path, *, files: FileSystem = DISK) -> int | None:
    """Return the iteration that the link to the best checkpoint points to; None if that is no complete checkpoint."""
    try:
        return read_commit_record(Path(folder) / BEST, files=files).iteration
    except CheckpointError:
        return None


def link_best_checkpoint(folder: str | Path, iteration: int, *, files: FileSystem = DISK) -> str:
    """Point the link to the best checkpoint at that of `iteration`, if it is complete. Returns a problem, usually ""."""
    target = iteration_folder(folder, iteration)
    if iteration_of_best_link(folder, files=files) == iteration or not any(
        step.folder == target for step in scan_checkpoint_folder(folder, files=files).steps
    ):
        return ""
    try:
        files.symlink(Path(folder) / BEST, target)
        files.sync_folder(Path(folder))
    except OSError as error:
        return f"{Path(folder) / BEST} does not lead to {target.name}, the best checkpoint: {error}"
    return ""


def expired_checkpoints(
    folder: str | Path,
    *,
    saved: int,
    interval: int | None,
    keep_last: int | None,
    best: int | None = None,
    files: FileSystem = DISK,
) -> list[CommittedCheckpoint]:
    """Return the older checkpoints to delete when iteration `saved` is committed: those that no retention rule keeps.

    interval: multiples of it are kept (`--save-retain-interval`). keep_last: so many are kept, including `saved`
    (`--save-keep-last`). Without either, none is deleted. best: an iteration that is kept, as is the one that the link
    to the best points to. Checkpoints that are links are kept.
    """
    if interval is None and keep_last is None:
        return []
    links = {entry.name for entry in _list_folder(folder, files) if entry.is_link}
    kept = {best, iteration_of_best_link(folder, files=files)}
    older = sorted(
        (step for step in scan_checkpoint_folder(folder, files=files).steps if step.iteration < saved),
        key=lambda step: -step.iteration,
    )
    return [
        step
        for step in older[(keep_last or 1) - 1 :]
        if not (interval and step.iteration % interval == 0)
        and step.folder.name not in links
        and step.iteration not in kept
    ]


def delete_checkpoints(steps: Sequence[CommittedCheckpoint], *, files: FileSystem = DISK) -> str:
    """Delete checkpoints. Returns why some could not be deleted, usually "": that is no reason for a run to end."""
    complaints = []
    for step in steps:
        try:
            _delete_checkpoint(step.folder, files)
        except OSError as error:
            complaints.append(f"{step.folder} cannot be deleted: {error}")
    return "; ".join(complaints)


def read_commit_record(folder: Path, *, files: FileSystem = DISK) -> CommitRecord:
    """Return the commit of a checkpoint's folder. Raises `CheckpointError` if it is missing or damaged."""
    path = folder / COMMIT
    try:
        content = read_file(files, path)
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {COMMIT}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    text = content.decode("ascii", errors="replace")
    lines = [line.split(" ") for line in text.split("\n")]
    body = text[: text.rfind("seal ")]
    version = lines[0][-1]
    if (
        text.startswith(_FIRST_LINE)
        and version.isdigit()
        and int(version) > FORMAT_VERSION
        and f"{body}seal {xxh3_hex_digest(body.encode())}\n" == text
    ):
        raise NewerFormatError(
            f"{folder} has format version {version}; this program reads up to {FORMAT_VERSION}, use a newer one"
        )
    try:
        fields = {line[0]: line[1:] for line in lines[1:-1]}
        (save,), (iteration,), (sequence,) = fields["save"], fields["iteration"], fields["sequence"]
        manifest, config = (FileSizeAndHash(int(fields[name][0]), fields[name][1]) for name in (MANIFEST, CONFIG))
        result = CommitRecord(save, int(iteration), int(sequence), manifest, config)
    except (KeyError, ValueError, TypeError, IndexError):
        result = None
    if result is None or result.text() != text:
        raise CheckpointError(f"{path} is damaged: it does not say what its seal was put on")
    return result


def read_committed_json(
    folder: Path, name: str, committed: FileSizeAndHash, *, files: FileSystem = DISK
) -> dict[str, Any]:
    """Return the object in a checkpoint's JSON file. `CheckpointError` if size or hash are not those in commit.txt."""
    path = folder / name
    try:
        content = read_file(files, path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    if (len(content), xxh3_hex_digest(content)) != (committed.size, committed.hash):
        raise CheckpointError(
            f"{path} is {'cut short' if len(content) < committed.size else 'damaged'}, changed, or of another save: "
            f"it has not the bytes that {COMMIT} was put on"
        )
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is damaged: it holds a {type(value).__name__}, not an object")
    return value


def read_saved_run_config(folder: str | Path, *, files: FileSystem = DISK) -> SavedRunConfig:
    """Read the settings and the number of ranks of the run that saved a checkpoint, from its config.json."""
    folder = Path(folder)
    config = read_committed_json(folder, CONFIG, read_commit_record(folder, files=files).config, files=files)
    if not isinstance(config.get("values"), dict) or not isinstance(config.get("world_size"), int):
        raise CheckpointError(f"{folder / CONFIG} is damaged: it must hold values and world_size")
    return SavedRunConfig(config["values"], config["world_size"])


def checkpoint_model_settings(folder: str | Path, step: int | None = None) -> dict[str, Any]:
    """Return the model and tokenizer settings of a checkpoint in `folder` (`--use-checkpoint-args`), by field name,
    without those that the user may choose anew.

    step: the iteration; None: the newest. Raises `CheckpointError` if there is no valid one.
    """
    values = saved_run_settings(folder, step)
    names = [field.name for config in (ModelConfig, TokenizerConfig) for field, _ in flag_fields(config)]
    result = {name: values[name] for name in names if name in values and name not in FREE}
    if "vocab_size" in result:
        result["vocab_size"] = resumed_null_vocab_size(result["vocab_size"], values)
    return result


def saved_run_settings(folder: str | Path, step: int | None = None) -> Mapping[str, Any]:
    """Return every setting of the run that saved the newest checkpoint in `folder`, or that of an iteration, by field
    name. A folder whose config.json is damaged is skipped, as it is when tensors are loaded.
    """
    folders = (
        [Path(folder)]
        if (Path(folder) / COMMIT).is_file()
        else [one.folder for one in checkpoints_to_try(folder, step)]
    )
    if not folders:
        raise CheckpointError(f"--use-checkpoint-args: {folder} holds no complete checkpoint to take the settings from")
    problems = []
    for one in folders:
        try:
            return read_saved_run_config(one).values
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError(
        f"--use-checkpoint-args: {folder} holds no sound checkpoint to take the settings from", problems
    )


def folder_num_bytes(folder: str | Path, *, files: FileSystem = DISK) -> int:
    """Return the size of a checkpoint on disk in bytes."""
    return sum(
        files.size(Path(folder) / entry.name) for entry in files.list_entries(Path(folder)) if not entry.is_folder
    )


def _checkpoint_folders(folder: str | Path, files: FileSystem) -> list[tuple[int, Path]]:
    """Return (iteration, path) of everything named like a checkpoint."""
    result = [(_STEP.fullmatch(entry.name), entry) for entry in _list_folder(folder, files) if entry.is_folder]
    return [(int(match[1]), Path(folder) / entry.name) for match, entry in result if match]


def _list_folder(folder: str | Path, files: FileSystem) -> list[Any]:
    """Return the entries of a folder; empty if it does not exist. Raises `CheckpointError` if it cannot be read."""
    try:
        return files.list_entries(Path(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from None


def _delete_checkpoint(path: Path, files: FileSystem) -> None:
    """Delete a checkpoint. It is renamed first, so that a partial one is never taken for complete."""
    gone = path.with_suffix(".gone")
    files.rename(path, gone)
    files.sync_folder(path.parent)
    _remove_tree_or_link(gone, files)


def _remove_tree_or_link(path: Path, files: FileSystem) -> None:
    """Delete a folder with its content; of a link or a file, only the name."""
    if any(
        entry.name == path.name and entry.is_folder and not entry.is_link for entry in files.list_entries(path.parent)
    ):
        remove_tree(files, path)
    else:
        files.remove(path)


def _json_file_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
