"""The network that a policy in training is compared with: preference losses and reinforcement learning ask it for log-probabilities."""

from __future__ import annotations

import dataclasses

from megatron.training.checkpoint.inference_model import GPT, load_network
from megatron.training.state.trainer import Trainer


def load_reference_policy(trainer: Trainer, folder: str | None) -> Trainer | None:
    """Return a trainer with a folder's reference network in the policy's layout, for forward passes only. None without
    a folder: the reference is then the base under the adapters, or there is none.
    """
    run = trainer.run
    if folder is None:
        return None
    loaded = load_network(
        folder,
        GPT,
        parallel=run.config.parallel,
        dtype=run.config.precision.param_dtype_name,
        tokenizer=dataclasses.asdict(run.config.tokenizer),
        device=run.mesh.device,
    )
    return dataclasses.replace(trainer, stages=list(loaded.stages), parallels=[], hooks=[], scripts={})
