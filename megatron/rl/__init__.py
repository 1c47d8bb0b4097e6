"""Reinforcement learning with verifiable rewards (RLVR), on this project's own generation engine.

    prompts -> rollouts: the engine samples answers with the weights in training -> rewards: an environment judges them
            -> advantages: answers of one prompt compared with each other -> one or more optimizer steps -> next prompts

advantages.py       advantages from rewards (GRPO, Dr. GRPO, RLOO, REINFORCE++), the length penalty of DAPO
losses.py           per-token policy losses (clipped ratios, GSPO, CISPO), KL estimators, importance-sampling weights
algorithms.py       which of them each --rl-algorithm uses
environments/       tasks with a reward: arithmetic, countdown, and a base class for one's own
rollouts.py         generate answers to prompts with the engine, on all ranks together
rollout_batches.py  rollouts as microbatches of a training step
policy_data.py      the data of the training loop: generates, scores and hands out microbatches
settings.py         the flags
"""
