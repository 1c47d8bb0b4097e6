"""train_rl.py as a user starts it: flags, refusals, a reference network, adapters, checkpoints, and what the checker says."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.plan.command import parse_training_command
from megatron.rl.arguments import parse_rl_args

ROOT = Path(__file__).resolve().parents[3]
NETWORK = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --lr 1e-3 "
    "--tokenizer-type ByteTokenizer --make-vocab-size-divisible-by 8 --micro-batch-size 4 --log-interval 1 --lr-decay-style constant"
)
POLICY = "--grpo-prompts-per-step 4 --grpo-group-size 2 --grpo-iterations 1 --rl-max-new-tokens 4 --rl-prompts-per-eval 2 --eval-interval 2"


def environments(folder: Path) -> Path:
    """An environment that rewards any digit."""
    (folder / "task.py").write_text(
        "from megatron.rl.environments.base import Environment, Problem\n"
        "class Digits(Environment):\n"
        "    def problem(self, number): return Problem(str(number % 10))\n"
        "    def reward(self, problem, answer): return sum(c < 'A' for c in answer) / 4\n"
        "    async def play(self, problem, conversation):\n"
        "        conversation.add(problem.prompt)\n"
        "        return self.reward(problem, await conversation.generate())\n"
    )
    path = folder / "environments.yaml"
    path.write_text("- agent_type: task.py:Digits\n")
    return path


def run(folder: Path, script: str, words: str, *, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run an entry script on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / script), *words.split()],
        cwd=folder,
        env={**os.environ, "MEGATRON_DEVICE": "cpu", "PYTHONPATH": str(ROOT)},
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )


def test_a_policy_is_trained_from_a_checkpoint_with_it_as_the_reference_and_goes_on(tmp_path: Path) -> None:
    path = environments(tmp_path)
    base = run(tmp_path, "pretrain_gpt.py", f"{NETWORK} --train-iters 1 --mock-data --eval-iters 0 --save base")
    assert base.returncode == 0, base.stderr
    common = f"{NETWORK} {POLICY} --langrl-env-config {path} --save policy --load policy --pretrained-checkpoint base --save-interval 2"
    first = run(tmp_path, "train_rl.py", f"{common} --train-iters 3")
    assert first.returncode == 0, first.stdout + first.stderr
    text = first.stdout + first.stderr
    assert "kl to reference: 0.000000E+00" in text, "at first the policy is the reference"
    assert text.count("held-out problems at iteration") == 2 and "round 2: reward" in text and "% generation" in text
    samples = [
        json.loads(line) for line in (tmp_path / "policy" / "rollouts" / "samples.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 3 * 8 and {"prompt", "answer", "reward"} <= samples[0].keys()
    assert "<h2>Iteration 2</h2>" in (tmp_path / "policy" / "rollouts" / "samples.html").read_text()
    ahead = "--rl-generation-ranks 1 --rl-generation-lag 1 --rl-verify-model-weights-swap"
    second = run(tmp_path, "train_rl.py", f"{common} --train-iters 4 {ahead}", ranks=2)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "round 3: reward" in second.stdout + second.stderr and "round 0" not in second.stdout
    assert "generation: rank 1 on " in second.stdout, "it is told which ranks generate"
    with gzip.open(tmp_path / "policy" / "rollouts" / "round_0000003.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 8 and all(len(row["reference"]) == len(row["rollout"]["ids"]) for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words, ranks",
    [
        # As docs/rl.md has it.
        (
            "--rl-generation-ranks 1 --rl-generation-lag 1 --tensor-model-parallel-size 2 --rl-inference-tensor-model-parallel-size 1",
            3,
        ),
        ("--rl-generation-ranks 1", 2),
        ("--rl-generation-ranks 1 --rl-generation-lag 2 --rl-partial-rollouts", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
        ("--context-parallel-size 2", 2),
        ("--use-torch-fsdp2 --rl-inference-tensor-model-parallel-size 2", 2),
        (
            "--use-torch-fsdp2 --bf16 --hybrid-layer-pattern MG --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 "
            "--linear-num-key-heads 2 --linear-num-value-heads 2 --linear-key-head-dim 8 --linear-value-head-dim 8",
            2,
        ),
    ],
)
def test_several_ranks_are_started_by_torchrun(tmp_path: Path, words: str, ranks: int) -> None:
    path = environments(tmp_path)
    common = f"{NETWORK} {POLICY} --langrl-env-config {path} --grpo-kl-beta 0 --train-iters 3 --micro-batch-size 2"
    done = run(tmp_path, "train_rl.py", f"{common} {words}", ranks=ranks)
    assert done.returncode == 0 and "round 2: reward" in done.stdout, done.stdout + done.stderr


def test_under_adapters_the_base_is_the_reference(tmp_path: Path) -> None:
    path = environments(tmp_path)
    base = run(tmp_path, "pretrain_gpt.py", f"{NETWORK} --train-iters 1 --mock-data --eval-iters 0 --save base")
    assert base.returncode == 0, base.stderr
    done = run(
        tmp_path,
        "train_rl.py",
        f"{NETWORK} {POLICY} --langrl-env-config {path} --pretrained-checkpoint base --train-iters 3 --lora-rank 2 --lr 3e-2 --grpo-kl-beta 0.1",
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    divergences = [float(part.split("|")[0]) for part in text.split("kl to reference: ")[1:]]
    assert divergences[0] == 0.0 and divergences[-1] > 0.0, "adapters begin as nothing, and move"


REFUSALS = [
    ("", "give --langrl-env-config"),
    ("--grpo-group-size 0", "--grpo-group-size 0 is not a positive number"),
    ("--global-batch-size 12", "--global-batch-size 12 does not divide the 8 rollouts"),
    ("--rl-algorithm rloo --grpo-group-size 1", "--rl-algorithm rloo compares answers"),
    ("--grpo-group-size 1", "--rl-algorithm grpo compares answers with the others to the same prompt"),
    ("--rl-algorithm reinforce++ --grpo-group-size 1", "--rl-algorithm reinforce++ compares answers"),
    ("", "--grpo-kl-beta 0.001 needs a reference network"),
    ("--lora-rank 2 --lora-modules-to-save *layernorm*", "no longer the reference; give it with --rl-reference"),
    ("--rl-default-temperature 0", "give a temperature above 0"),
    ("--rl-dual-clip 0.5", "--rl-dual-clip 0.5 must be above 1"),
    ("--rl-importance-sampling-truncation-coef 2", "add that"),
    ("--rl-importance-sampling-mode sequence_truncate", "add that"),
    (
        "--rl-importance-sampling-mode token_mask --rl-inference-logprobs-is-correction",
        "give --rl-importance-sampling-truncation-coef",
    ),
    ("--rl-value-clip 0.1", "--rl-value-clip set up the critic of --rl-algorithm ppo"),
    ("--rl-algorithm ppo --rl-discount 1.5", "must lie between 0 and 1"),
    ("--rl-algorithm ppo --rl-critic-lr-ratio 0", "--rl-critic-lr-ratio 0.0 must be positive"),
    ("--rl-algorithm ppo --lora-rank 2", "--lora-rank freezes all but adapters"),
    ("--rl-algorithm ppo --use-torch-fsdp2", "give --use-distributed-optimizer"),
    ("--hidden-dropout 0.1", "--hidden-dropout 0 --attention-dropout 0"),
    ("--no-calculate-per-token-loss", "leave out --no-calculate-per-token-loss"),
    ("--mtp-num-layers 1", "leave it out"),
    ("--rl-use-sequence-packing", "add --reset-attention-mask --reset-position-ids"),
    ("--rl-partial-rollouts --rl-generation-lag 0", "1 or more with --rl-partial-rollouts"),
    ("--rl-generation-lag 1 --rl-max-logprob-difference 0.1", "older weights sample, which differ by nature"),
    ("--rl-generation-ranks 1", "--rl-generation-ranks leaves none of the 1 ranks of the job to train"),
    ("--rl-eval-answers 0", "--rl-eval-answers 0 is too small"),
    ("--rl-offload-inference-model-weights-when-idle", "needs a network of its own for generation"),
    ("--rl-kv-cache-management-mode persist", "every round has a cache of its own"),
    ("--rl-submission-granularity G", "rollouts are submitted and trained on in rounds"),
    ("--rl-persist-cuda-graphs", "captured graphs of generation end with its round"),
    ("--rl-profile", "use --profile"),
    ("--rl-inference-parsers x", "reads what an answer says itself"),
    ("--rl-max-new-tokens 16", "must lie between 1 and --seq-length 16 - 1"),
]


@pytest.mark.parametrize("words, message", REFUSALS, ids=[f"{a or 'nothing'}-{b[:20]}" for a, b in REFUSALS])
def test_what_the_run_refuses_the_checker_refuses_in_the_same_words(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*NETWORK.split(), *POLICY.split(), "--train-iters", "1", *words.split()]
    with pytest.raises(SystemExit) as end:
        parse_rl_args(flags, world_size=1, speaks=True)
    text = capsys.readouterr().err
    assert end.value.code == 2 and message in text
    said = [broken.says for broken in parse_training_command(["train_rl.py", *flags], ranks=1).unread]
    assert any(message in line for line in said) and all(line in text for line in said)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--rl-generation-ranks 1 --rl-offload-optimizer-during-inference", "no rank both trains and generates"),
        ("--rl-generation-ranks 1 --rl-inference-tensor-model-parallel-size 2", "the network that generates: "),
        ("--rl-generation-ranks 2 --tensor-model-parallel-size 2", "--tensor-model-parallel-size 2"),
        ("--rl-generation-ranks=-1", "--rl-generation-ranks -1 must be 0 or more"),
    ],
)
def test_a_job_cannot_be_split_against_a_rule(words: str, message: str) -> None:
    flags = [*NETWORK.split(), *POLICY.split(), "--train-iters", "1", "--grpo-kl-beta", "0", *words.split()]
    command = parse_training_command(["train_rl.py", *flags, "--langrl-env-config", "x"], ranks=3)
    said = [one.says for one in (*command.unread, *(command.setting.find_broken_rules() if command.setting else ()))]
    assert any(message in line for line in said), said


def test_a_layout_of_generation_that_breaks_a_rule_is_refused() -> None:
    flags = [*NETWORK.split(), *POLICY.split(), "--train-iters", "1", "--rl-inference-tensor-model-parallel-size", "3"]
    said = [broken.says for broken in parse_training_command(["train_rl.py", *flags], ranks=3).unread]
    assert any(
        line.startswith("the network that generates: ") and "--num-attention-heads 2" in line for line in said
    ), said


def test_flags_of_reinforcement_learning_are_known_to_other_scripts_by_name() -> None:
    command = parse_training_command(
        ["pretrain_gpt.py", *NETWORK.split(), "--mock-data", "--train-iters", "1", "--grpo-group-size", "4"]
    )
    assert any("start train_rl.py" in broken.says for broken in command.unread)
