"""What a run tells of its answers: samples on a page, and how often one of k answers to held-out problems is right."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import nullcontext
from pathlib import Path

import pytest

from megatron.cli.commands import check_config, plan
from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.inference import InferenceConfig
from megatron.inference.engine import Engine
from megatron.inference.sampling import SamplingParams
from megatron.plan.analytic_estimate import with_padded_vocabulary
from megatron.plan.command import parse_training_command
from megatron.rl import policy_data
from megatron.rl.environments.base import Conversation, Environment, Problem
from megatron.rl.environments.config import EnvironmentWithWeight
from megatron.rl.held_out_evaluation import held_out_problem_scores, held_out_scores_text, pass_at_k, powers_of_two
from megatron.rl.planned_memory import (
    fullest_rank_min_memory_by_part,
    generation_memory,
    memory_beside_policy,
    train_and_generation_rank_lines,
)
from megatron.rl.rollout_sample_files import RolloutSampleFiles, read_rollout_samples
from megatron.rl.rollouts import Rollout, RolloutLimits
from megatron.training.state.step import train_step
from tests.helpers.policy import RL, EvenIds, trainer_of


@pytest.mark.parametrize("answers, right, k", [(5, 2, 1), (5, 2, 3), (4, 0, 2), (4, 4, 2), (6, 5, 3)])
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(answers: int, right: int, k: int) -> None:
    draws = [any(draw) for draw in itertools.combinations([True] * right + [False] * (answers - right), k)]
    assert pass_at_k(k, right=right, answers=answers) == pytest.approx(sum(draws) / len(draws))


class Fixed(Environment):
    """Not played."""

    def problem(self, number: int) -> Problem:
        """None."""
        return Problem("")

    def reward(self, problem: Problem, answer: str) -> float:
        """None."""
        return 0.0


def test_held_out_answers_are_counted_by_problem_and_failures_are_wrong() -> None:
    rl = dataclasses.replace(RL, rl_prompts_per_eval=2, rl_eval_answers=3)
    rewards = iter([1.0, 0.0, 0.5, 0.0, 0.0, float("nan")])
    seeds = []

    def play(tasks, limits):  # type: ignore[no-untyped-def]
        assert limits.sampling.temperature == 0.8
        seeds.extend(task.seed for task in tasks)
        return [
            Rollout(t.name, t.number, t.group, (), (), (), r := next(rewards), True, problem="" if r == r else "failed")
            for t in tasks
        ]

    results = held_out_problem_scores(
        rl, [EnvironmentWithWeight("fixed", Fixed(), 1.0)], RolloutLimits(SamplingParams(0.8), 9, 9), play
    )
    assert results["fixed"]["reward"] == pytest.approx(1.5 / 5)
    assert results["fixed"]["pass@1"] == pytest.approx(1 / 6) and results["fixed"]["pass@3"] == 0.5
    assert (
        len(set(seeds)) == 3 and held_out_scores_text(results) == "fixed 0.300 pass@1 0.167 pass@2 0.333 pass@3 0.500"
    )
    assert powers_of_two(8) == [1, 2, 4, 8]


def test_samples_are_lines_and_a_page_and_later_lines_count(tmp_path: Path) -> None:
    files = RolloutSampleFiles(tmp_path)
    sample = {
        "iteration": 3,
        "prompt": "<script>1</script>",
        "answer": "2",
        "reward": 0.25,
        "tokens": 1,
        "finished": True,
    }
    files.write(3, [sample, sample])
    files.write(4, [{**sample, "iteration": 4, "reward": float("nan"), "failure": "it <hung>"}])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"iteration": 5, "pro')  # torn by a kill
        file.write("\n")
    RolloutSampleFiles(tmp_path).write(3, [{**sample, "answer": "again"}])
    assert [one["answer"] for one in read_rollout_samples(tmp_path / "samples.jsonl")[3]] == ["again"]
    page = (tmp_path / "samples.html").read_text()
    assert "&lt;script&gt;" in page and "<script>" not in page and "it &lt;hung&gt;" in page
    assert page.index("Iteration 4") < page.index("Iteration 3")


def test_a_run_shows_answers_with_their_rewards() -> None:
    trainer, data = trainer_of(RL)
    train_step(trainer, data)
    shown = data.shown_answers()
    assert len(shown) == 4 and all("[reward " in text for _, text in shown)


def test_the_prompt_of_an_environment_that_makes_it_while_it_plays_is_shown() -> None:
    class Late(EvenIds):
        """The prompt is not known before, as with agents."""

        def problem(self, number: int) -> Problem:
            """As the base class says."""
            return Problem("")

        async def play(self, problem: Problem, conversation: Conversation) -> float:
            """Two texts before the answer and one after it."""
            conversation.add("1 2")
            conversation.add(" 3")
            answer = await conversation.generate()
            conversation.add(" 4")
            return self.reward(problem, answer)

    trainer, data = trainer_of(RL)
    data.queue.environments = (dataclasses.replace(data.queue.environments[0], environment=Late()),)
    train_step(trainer, data)
    assert data.rollouts is not None and {one.rollout.prompt for one in data.rollouts} == {"1 2 3"}


def test_the_planned_memory_is_that_of_the_tensors() -> None:
    rl = dataclasses.replace(RL, rl_inference_tensor_model_parallel_size=1, rl_algorithm="ppo")
    trainer, data = trainer_of(rl)
    data.prepare_step(16)
    parts = memory_beside_policy(rl, trainer.run.config, 1)
    assert data._generator is not None
    held = sum(param.numel() * 8 for stage in data._generator.stages for param in stage.parameters())
    assert parts["copy that generates"] == held and parts["critic"] > held and "reference" not in parts
    engine = Engine(data._generator.stages, trainer.run.tokenizer, InferenceConfig(inference_max_requests=16))
    assert parts["keys and values"] == 16 * trainer.run.config.train.seq_length * engine.metrics().bytes_per_token


def test_the_planner_counts_what_reinforcement_learning_holds_beside_the_policy(tmp_path: Path) -> None:
    words = (
        "train_rl.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
        "--lr 1e-3 --train-iters 1 --langrl-env-config x --pretrained-checkpoint base --rl-algorithm ppo --lr-decay-style constant"
    )
    command = parse_training_command(words.split(), ranks=1)
    assert not command.unread and command.setting is not None
    config = with_padded_vocabulary(command.setting.with_elastic_layout().config.resolve(1), 1000)
    assert {"reference", "critic", "keys and values"} == command.beside(config, 1).keys()


def test_what_cannot_fit_the_memory_is_refused_by_the_checker_and_by_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "train_rl.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16 "
        "--micro-batch-size 1 --lr 1e-6 --train-iters 1 --langrl-env-config x --pretrained-checkpoint base --tokenizer-type NullTokenizer "
        "--vocab-size 32000 --use-distributed-optimizer"
    ).split()

    def says(*more: str, ranks: int = 8) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            check_config.main(["--gpu", "h100-80", "--device", "cuda", "--world-size", str(ranks), *words, *more])
        return int(str(end.value.code)), capsys.readouterr().out

    code, text = says()
    assert code == 2 and "the fullest rank needs at least" in text and "policy in training" in text, text
    assert says("--tensor-model-parallel-size", "8", "--sequence-parallel") == (0, "all rules are kept on 8 ranks\n")
    trainer, _ = trainer_of(RL)
    for memory, fits in ((10**9, True), (10**5, False)):
        monkeypatch.setattr(policy_data, "free_and_total_memory", lambda device, memory=memory: (0, memory))
        with nullcontext() if fits else pytest.raises(ConfigError, match="the fullest rank needs at least"):
            policy_data.refuse_beyond_device_memory(RL, trainer.run)


def test_ranks_of_their_own_have_their_own_memory() -> None:
    trainer, _ = trainer_of(RL)
    rl, config = dataclasses.replace(RL, rl_generation_ranks=2, rl_reference="x", grpo_kl_beta=1.0), trainer.run.config
    held = sum(param.numel() * 8 for param in trainer.stages[0].parameters())
    assert memory_beside_policy(rl, config, 1) == {"reference": held}
    length = config.train.seq_length
    generating = {"network that generates": held, "keys and values": 8 * length * 2 * 4 * 32 * 8}
    assert generation_memory(rl, config, 1) == generating, "16 rollouts of a round over 2 replicas"
    assert fullest_rank_min_memory_by_part(rl, config, 1).keys() == {"policy in training", "reference"}
    large = dataclasses.replace(rl, grpo_prompts_per_step=4000)
    assert fullest_rank_min_memory_by_part(large, config, 1).keys() == generating.keys()


def test_the_plan_of_ranks_says_who_holds_what_and_where() -> None:
    trainer, _ = trainer_of(RL)
    rl = dataclasses.replace(RL, rl_generation_ranks=3, rl_reference="x", grpo_kl_beta=1.0)
    title, training, generation = train_and_generation_rank_lines(rl, trainer.run.config, 1, ["a", "a", "b", "b"])
    assert "who holds what" in title
    assert "rank 0 on a (data 1): policy in training" in training and ", reference" in training
    assert "ranks 1 on a, 2 to 3 on b (data 3): network that generates" in generation
    assert generation.endswith("rank 1 plays the environments")


def test_the_planner_always_tells_the_memory_of_ranks_that_only_generate(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "train_rl.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
        "--lr 1e-3 --train-iters 1 --langrl-env-config x --grpo-kl-beta 0 --lr-decay-style constant --grpo-prompts-per-step 2"
    ).split()
    with pytest.raises(SystemExit) as end:
        plan.main(["--true-vocab-size", "256", "--world-size", "2", "--", *words, "--rl-generation-ranks", "1"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "a rank that only generates holds: network that generates" in text, text
    command = parse_training_command(words, ranks=1)
    assert command.setting is not None and not command.apart(command.setting.config.resolve(1), 1)


def test_generation_and_training_need_memory_at_different_times() -> None:
    trainer, _ = trainer_of(RL, seq_length=64, max_position_embeddings=64)
    rl, config = dataclasses.replace(RL, rl_inference_tensor_model_parallel_size=1), trainer.run.config
    parameters = sum(param.numel() for param in trainer.stages[0].parameters())
    beside = memory_beside_policy(rl, config, 1)
    assert beside["keys and values"] == 16 * 64 * 2 * 4 * 32 * 8, "16 texts, 4 layers, hidden size 32, 8 bytes"
    parts = fullest_rank_min_memory_by_part(rl, config, 1)
    assert parts.keys() == {"policy while it generates", "copy that generates", "keys and values"}
    off = fullest_rank_min_memory_by_part(
        dataclasses.replace(rl, rl_offload_optimizer_during_inference=True), config, 1
    )
    assert off.get("policy while it generates", 8 * parameters) == 8 * parameters < parts["policy while it generates"]
    short = fullest_rank_min_memory_by_part(
        dataclasses.replace(rl, grpo_prompts_per_step=1, grpo_group_size=1), config, 1
    )
    assert short.keys() == {"policy in training", "copy that generates"}
    assert short["policy in training"] > parts["policy while it generates"]
