"""Prompts of a file, whose answers a reward model scores (finetune.py --finetune-task reward, or one of Hugging Face's)."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

from megatron.core.config.flags.declare import ConfigError
from megatron.evaluation.reward_model import RewardModel
from megatron.rl.environments.base import Conversation, Environment, Problem, ProblemFile
from megatron.training.checkpoint.inference_model import REWARD, open_model_checkpoint


class RewardModelEnvironment(Environment):
    """Answers to the prompts of a JSONL file, scored by a reward model, which the first rank holds whole.

    model: a checkpoint, or a folder of Hugging Face's with an ...ForSequenceClassification of one label. path: lines with `prompt`; the last
    `held_out` of them are for evaluation only. template: of what the policy continues, with {prompt}. chat_format: the reward model reads prompt
    and answer as a conversation of that format (`RewardModel`); left out: as one text. sigmoid: the reward is the sigmoid of the score, between 0 and
    1; else the score. cut_off: reward of an answer that was cut off at the limit. tokenizer: settings of the reward model's tokenizer, where
    its folder does not say them.
    """

    def __init__(
        self,
        *,
        model: str,
        path: str,
        held_out: int = 0,
        template: str = "{prompt}",
        chat_format: str | None = None,
        sigmoid: bool = True,
        cut_off: float = 0.0,
        tokenizer: Mapping[str, Any] | None = None,
    ) -> None:
        open_model_checkpoint(model, REWARD)  # every rank says at once what is wrong with it
        self._file, self._template = ProblemFile("reward_model", path, ("prompt",), held_out), template
        if "{prompt}" not in template:
            raise ConfigError(f"environment reward_model: the template {template!r} must have {{prompt}}")
        self._path, self._tokenizer = model, tokenizer
        self._chat_format, self._sigmoid, self._cut_off = chat_format, sigmoid, cut_off
        self._model: RewardModel | None = None
        self._turn = threading.Lock()

    def start(self) -> None:
        """Load the reward model, whole on this rank."""
        self._model = RewardModel.load(
            self._path, template=self._chat_format or "tokenizer", tokenizer=self._tokenizer, alone=True
        )

    def problem(self, number: int) -> Problem:
        """As the base class says. Prompts are taken in the order of the file, again and again."""
        (prompt,) = self._file.row_of_problem(number)
        return Problem(self._template.format(prompt=prompt), {"prompt": prompt})

    def reward(self, problem: Problem, answer: str) -> float:
        """Return the model's score of the answer, or its sigmoid. Each text is scored alone, so that nothing else
        affects its score.
        """
        text: Any = problem.prompt + answer
        if self._chat_format is not None:
            prompt = problem.facts["prompt"]
            text = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        assert self._model is not None, "the rank that plays has started its environments"
        with self._turn:  # with --rl-rollout-seconds rewards run in threads
            (score,) = self._model.score([text])
        return _sigmoid(score) if self._sigmoid else score

    async def play(self, problem: Problem, conversation: Conversation) -> float:
        """Sample one answer and return its reward; `cut_off` if it was cut off at the limit."""
        conversation.add(problem.prompt)
        answer = await conversation.generate()
        return await conversation.call(self.reward, problem, answer) if conversation.is_finished else self._cut_off


def _sigmoid(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score)) if score >= 0 else math.exp(score) / (1.0 + math.exp(score))
