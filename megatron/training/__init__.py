"""The training program. The only package that knows flags.

entry.py       what surrounds a main function: errors, on one rank or on all
initialize.py  initialize_megatron(args) -> Run
run.py         Run: what initialize_megatron returns and every provider receives
loop.py        pretrain() and the loop; step.py: one optimizer step; evaluate.py: forward-only passes
hooks.py       StepHooks: what takes part in a training step
trainer.py     this rank's stages, their gradient buckets and the optimizer
loader.py      datasets to iterators of microbatches
global_vars.py get_args() and friends, for user scripts written against Megatron
cli/           flags to RunConfig, old spellings, --help, and the checks before a run starts
data/          which samples a step reads, and how they become microbatches
checkpoint/    what a run saves, where it resumes from, and whether the two fit
report/        metrics, timers, writers, and the run log
health/        step validation, failure dumps, replica checks, hang detection, exit conditions
launch/        rank and address, the rendezvous store, elastic layouts, spare ranks
accelerate/    torch.compile and CUDA graphs
"""
