"""Reinforcement learning with verifiable rewards (RLVR), on this project's own generation engine.

    prompts -> rollouts: the engine samples answers with the weights in training -> rewards: an environment judges them
            -> advantages: answers of one prompt compared with each other -> one or more optimizer steps -> next prompts

advantages.py           advantages from rewards (GRPO, Dr. GRPO, RLOO, REINFORCE++), the length penalty of DAPO
losses.py               per-token policy losses (clipped ratios, GSPO, CISPO), KL estimators, importance-sampling weights
algorithms.py           which of them each --rl-algorithm uses
policy_step.py          one forward pass of policy training, and its loss
critic.py               the critic of PPO
environments/           tasks with a reward: arithmetic, countdown, and a base class for one's own
rollouts.py             generate answers to prompts with the engine, on all ranks together
prompt_encoding.py      ids of what an environment says
rollout_queue.py        rollouts sampled some rounds ahead of their training
generation_ranks.py     ranks that only generate; ray_ranks.py: started over Ray; refit.py: the weights in training, copied to them
bank.py                 a file of rollouts for each round; rollout_sample_files.py: answers and rewards for people to read
rollout_batches.py      rollouts as microbatches of a training step
policy_data.py          the data of the training loop: generates, scores and hands out microbatches
settings.py             the flags
held_out_evaluation.py  the mean reward of held-out problems
planned_memory.py       bytes beside the policy in training, by formulas
arguments.py            the command line of train_rl.py
"""
