"""The run, what trains on this rank, and one step of it.

run.py           RunContext: what initialize_megatron returns and every provider receives
trainer.py       this rank's stages, their gradient buckets and the optimizer
hooks.py         StepHooks: what takes part in a training step, and in what a run does between two steps
batch.py         one microbatch, and what becomes of it; microbatches.py: how many microbatches a global batch has
step.py          one optimizer step; evaluate.py: forward-only passes
"""
