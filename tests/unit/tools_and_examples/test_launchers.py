"""Launchers: every shell script under examples/ gives flags that fit together, and Slurm jobs come back until they are done.

`LAUNCH=echo` makes a launcher print its command; what follows the entry script there is read as a run would read it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.core.config.settings.run import RunConfig
from megatron.training.state.microbatches import BatchSchedule
from tests.helpers.architecture import ROOT
from tests.helpers.flags import parse_args_or_raise, run_config_of_args

LAUNCHERS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "examples/gpt3").glob("train_*.sh"))
PATHS = ("checkpoints", "tensorboard", "vocab.json", "merges.txt", "corpus_text_document")
MACHINES = {"examples/gpt3/train_gpt3_175b_distributed.sh": (16, 32, 64, 128, 256)}


@dataclasses.dataclass(frozen=True)
class Command:
    """What a launcher would start: ranks, and the flags of the entry script."""

    ranks: int
    entry: str
    flags: list[str]

    @classmethod
    def read(cls, words: Sequence[str]) -> Command:
        """From the words after torchrun."""
        place = next(place for place, word in enumerate(words) if word.endswith(".py"))
        options = dict(zip(words[:place], words[1:place]))
        ranks = int(options["--nproc_per_node"]) * int(options.get("--nnodes", "1"))
        return cls(ranks, Path(words[place]).name, list(words[place + 1 :]))

    def config(self) -> RunConfig:
        """The checked config of the run; the batch must be cut evenly over its whole course."""
        assert (ROOT / self.entry).is_file(), f"{self.entry} is no entry script"
        config = run_config_of_args(parse_args_or_raise(self.flags, world_size=self.ranks), self.ranks)
        BatchSchedule.build(
            config.train,
            data_parallel_size=config.parallel.data_parallel_size(self.ranks),
            seq_length=config.train.seq_length,
        ).require_divisible_sizes()
        return config


def bash(command: Sequence[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script. Its environment names no GPUs or machines but those given."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GPUS_PER_NODE", "NUM_NODES", "NODE_RANK", "PRECISION", "LAUNCH", "PYTHON")
    }
    return subprocess.run(
        ["bash", *command], cwd=folder, env=env | environment, text=True, capture_output=True, timeout=60
    )


def launch(launcher: str, *arguments: str, folder: Path, **environment: str) -> Command:
    """The command that a launcher prints."""
    done = bash([str(ROOT / launcher), *arguments], folder, LAUNCH="echo", **environment)
    assert done.returncode == 0, done.stderr
    return Command.read(shlex.split(done.stdout))


def script(path: Path, text: str) -> None:
    """An executable script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launchers_flags_fit_together_on_its_machines(launcher: str, tmp_path: Path) -> None:
    for machines in MACHINES.get(launcher, (1,)):
        command = launch(launcher, *PATHS, folder=tmp_path, GPUS_PER_NODE="8", NUM_NODES=str(machines))
        config = command.config()
        assert command.ranks == 8 * machines
        assert (config.checkpoint.save, config.checkpoint.load) == (PATHS[0], PATHS[0]), "a run must find what it saved"
        assert config.log.tensorboard_dir == PATHS[1]
        assert (config.tokenizer.vocab_file, config.tokenizer.merge_file) == PATHS[2:4]
        assert config.data.data_path == (PATHS[4],)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_flags_after_a_launchers_arguments_win(launcher: str, tmp_path: Path) -> None:
    command = launch(launcher, *PATHS, "--lr", "0.125", "--seed", "7", folder=tmp_path)
    config = command.config()
    assert (config.schedule.lr, config.train.seed) == (0.125, 7)


def test_a_printed_command_can_be_pasted(tmp_path: Path) -> None:
    odd = ("--wandb-exp-name", 'it\'s $HOME; a "name"', "--moe-layer-freq", "([0]*1+[1]*11)", "--log-jsonl", "")
    done = bash([str(ROOT / LAUNCHERS[0]), "a folder", *PATHS[1:], *odd], tmp_path, LAUNCH="echo", GPUS_PER_NODE="8")
    assert done.stdout.startswith("torchrun --nproc_per_node 8 "), done.stdout
    pasted = bash(["-c", "torchrun() { printf '%s\\0' \"$@\"; }\n" + done.stdout], tmp_path)
    words = pasted.stdout.split("\0")[:-1]
    assert tuple(words[-len(odd) :]) == odd and words[words.index("--save") + 1] == "a folder", (
        pasted.stdout + pasted.stderr
    )


def test_the_sizes_of_the_models_are_those_in_their_names(tmp_path: Path) -> None:
    sizes = {}
    for launcher in LAUNCHERS:
        model = launch(launcher, *PATHS, folder=tmp_path).config().model
        h, f = model.hidden_size, model.ffn_hidden_size
        layer = 4 * h * h + 2 * h * f + 9 * h + f  # attention, MLP, their biases and two norms
        sizes[Path(launcher).stem] = (
            model.num_layers * layer + h * (50257 + model.max_position_embeddings) + 2 * h
        ) / 1e6
    assert sizes["train_gpt3_125m"] == pytest.approx(125, rel=0.02)
    assert sizes["train_gpt3_345m"] == pytest.approx(
        355, rel=0.02
    )  # published as 345M, counted without its embedding rows
    assert sizes["train_gpt3_175b_distributed"] == pytest.approx(175e3, rel=0.01)


def test_without_data_the_small_model_runs_on_the_text_of_the_repository(tmp_path: Path) -> None:
    command = launch("examples/gpt3/train_gpt3_125m.sh", folder=tmp_path)
    config = command.config()
    assert config.train.train_iters <= 20 and config.checkpoint.save is None
    assert Path(config.tokenizer.vocab_file).is_file() and Path(config.tokenizer.merge_file).is_file()
    documents = len((ROOT / "examples/data/demo_train_small.jsonl").read_text(encoding="utf-8").splitlines())
    shares = [float(share) for share in config.data.split.split(",")]
    assert all(share == 0 or share / sum(shares) * documents >= 2 for share in shares), (
        "a part of the split would be empty"
    )


@pytest.mark.parametrize("launcher", [name for name in LAUNCHERS if "125m" not in name])
def test_a_launcher_without_its_arguments_says_what_it_needs(launcher: str, tmp_path: Path) -> None:
    done = bash([str(ROOT / launcher)], tmp_path)
    assert done.returncode == 2
    assert f"bash {launcher} CHECKPOINTS" in done.stderr and "LAUNCH=echo" in done.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.s*h")), ids=lambda path: path.name)
def test_every_script_is_bash_that_can_be_read(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert path.name in ("setup.sh", "print_command.sh") or "set -euo pipefail" in text or "set -uo pipefail" in text


# A python for the quick start: it notes what training was asked for, and writes a log that ends at the loss $FINAL.
PRETENDER = """
case "$*" in
    *torch.distributed.run*)
        echo "$@" >>commands
        for i in $(seq 1 1000); do echo '{"kind": "step", "iteration": '$i', "losses": {"lm loss": '$FINAL'}}'; done >runs/quickstart/log.jsonl
        echo '{"kind": "validation", "iteration": 1000, "losses": {"lm loss": 6.0}}' >>runs/quickstart/log.jsonl ;;
    *unigram-entropy*) echo 6.5 ;;
    *tools/preprocess_data.py*valid*) head -c 200 /dev/zero >runs/quickstart/valid_text_document.bin ;;
    *tools/* | "-m megatron "*) echo "$1" ;;
    *) exec REAL "$@" ;;
esac
"""


@pytest.mark.parametrize("gpus, final, code", [(0, "5.4", 0), (1, "5.0", 0), (4, "5.8", 1)])
def test_the_quick_start_trains_under_two_layouts_and_checks_the_loss(
    tmp_path: Path, gpus: int, final: str, code: int
) -> None:
    for name in ("quickstart.sh", "setup.sh"):
        script(tmp_path / "examples" / name, (ROOT / "examples" / name).read_text(encoding="utf-8"))
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    script(tmp_path / "python", PRETENDER.replace("REAL", sys.executable))
    script(tmp_path / "bin/nvidia-smi", f"for i in $(seq 1 {gpus}); do echo GPU $i; done; exit {int(gpus == 0)}")
    (tmp_path / "runs/quickstart/stale").mkdir(parents=True)
    texts = tmp_path / "examples/data/demo_valid.jsonl"
    texts.parent.mkdir()
    texts.write_text(json.dumps({"text": "a" * 400}) + "\n")
    done = bash(
        ["examples/quickstart.sh"],
        tmp_path,
        PYTHON=str(tmp_path / "python"),
        FINAL=final,
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert (
        "unigram entropy         6.500" in done.stdout and f"final training loss     {float(final):.3f}" in done.stdout
    )
    assert "perplexity 403.4" in done.stdout
    # 100 ids of two bytes tell 400 bytes of text
    assert f"{6.0 * 100 / 400 / math.log(2):.3f} bits per byte" in done.stdout
    assert not (tmp_path / "runs/quickstart/stale").exists(), "the folder of an earlier run was not emptied"
    first, second = (
        Command.read([*line.split("run --standalone ")[1].split()])
        for line in (tmp_path / "commands").read_text().splitlines()
    )
    layouts = [(one.ranks, one.config().parallel.tp, one.config().parallel.pp) for one in (first, second)]
    assert layouts == ([(1, 1, 1), (1, 1, 1)] if gpus == 1 else [(2, 2, 1), (2, 1, 2)])
    train = first.config().train
    assert train.exit_interval is not None and train.train_iters > train.exit_interval
    rest = dataclasses.replace(
        second.config().train, exit_interval=train.exit_interval, micro_batch_size=train.micro_batch_size
    )
    assert rest == train, "both parts belong to one run"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """Slurm's commands, made up: the step runs for ever until it is cancelled; what is called is noted in `calls`."""
    script(tmp_path / "bin/scontrol", 'echo "scontrol $*" >>calls; [ "$1" = requeue ] || printf "node7\\nnode8\\n"')
    script(tmp_path / "bin/scancel", 'echo "scancel $*" >>calls; touch cancelled')
    script(
        tmp_path / "bin/srun",
        'shift; SLURM_NODEID=1 "$@" >printed; until [ -e cancelled ]; do sleep 0.05; done; exit ${CODE:-0}',
    )
    return tmp_path


def submit(cluster: Path, **environment: str) -> subprocess.Popen[str]:
    """The batch script of a job of two machines, started."""
    env = os.environ | {
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(cluster),
        "LAUNCH": "echo",
        "SLURM_JOB_ID": "20042",
        "SLURM_JOB_NUM_NODES": "16",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }
    command = [
        "bash",
        str(ROOT / "examples/slurm/train.sbatch"),
        str(ROOT / "examples/gpt3/train_gpt3_175b_distributed.sh"),
        *PATHS,
    ]
    job = subprocess.Popen(command, env=env | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(400):
        if (cluster / "printed").exists() and (cluster / "printed").read_text().endswith("\n"):
            return job
        time.sleep(0.05)
    job.kill()
    raise AssertionError(f"the job did not start: {job.communicate()}")


def test_a_job_near_its_time_limit_saves_and_goes_back_into_the_queue(cluster: Path) -> None:
    job = submit(cluster, CODE="1")  # torchrun does not end with 0 when it was told to stop
    job.send_signal(signal.SIGUSR1)
    said, _ = job.communicate(timeout=300)
    assert job.returncode == 0, said
    assert (cluster / "calls").read_text().splitlines()[1:] == ["scancel --signal=TERM 20042", "scontrol requeue 20042"]


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_ends_by_itself_stays_away_from_the_queue(cluster: Path, code: int) -> None:
    job = submit(cluster, CODE=str(code))
    (cluster / "cancelled").touch()
    job.communicate(timeout=300)
    assert job.returncode == code
    assert "requeue" not in (cluster / "calls").read_text()


def test_a_job_starts_the_launcher_on_every_machine_with_its_place(cluster: Path) -> None:
    job = submit(cluster)
    (cluster / "cancelled").touch()
    job.communicate(timeout=300)
    words = (cluster / "printed").read_text().split()
    options = dict(zip(words, words[1:]))
    assert [options[name] for name in ("--nnodes", "--node_rank", "--master_addr", "--nproc_per_node")] == [
        "16",
        "1",
        "node7",
        "8",
    ]
    assert 1024 < int(options["--master_port"]) < 65536
    assert Command.read(words).config().data.data_path == (PATHS[4],)
