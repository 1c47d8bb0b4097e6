"""The training program.

entry.py       what surrounds a main function: errors, on one rank or on all
initialize.py  initialize_megatron(checked) -> Run; checked_run.py: what it takes
loop.py        pretrain(): sessions, and what comes before and after them
session.py     one stretch of a run: its iterations, and what hooks are given between them
state/         the run, this rank's stages and optimizer, and one optimizer step
hooks/         log lines, evaluations, saves: what a run does between two steps
loader.py      datasets to iterators of microbatches
global_vars.py get_args() and friends, for user scripts written against Megatron
data/          which samples a step reads, and how they become microbatches
checkpoint/    what a run saves, where it resumes from, and whether the two fit
report/        metrics of a step, timers, and the file of the run log
health/        step validation, failure dumps, replica checks, hang detection, exit conditions
launch/        rank and address, the rendezvous store, elastic layouts, spare ranks
accelerate/    torch.compile and CUDA graphs
"""
