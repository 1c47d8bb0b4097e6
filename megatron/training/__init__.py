"""The training program. The only package that knows flags.

run.py            Run: what initialize_megatron returns and every provider receives
arguments.py      flags to namespace to RunConfig
preflight.py      whether a run can start: rules, tokenizer, files, machine
device_checks.py  what a run asks of the machine: kernels, compiler, GPU
entry.py          what stands around a main function: errors, on one rank or on all
legacy_flags.py   old, renamed and refused Megatron flags, as a table (legacy_table.py)
place.py          where the launcher put this process
elastic.py  standby.py     the layout for the ranks that there are, and ranks that it has no place for
ledger.py  recording.py    what a run was given and what became of it, appended to a file
initialize.py     initialize_megatron(args) -> Run
global_vars.py    get_args() and friends, for user scripts
stages.py         this rank's stages, their buckets and the optimizer
compiling.py      --compile: torch's compiler on their layers
graphs.py         --cuda-graph-impl: their layers as CUDA graphs
batch.py          one microbatch, and the loss over its tokens
data.py           datasets to iterators of microbatches
step.py           one optimizer step
loop.py           pretrain() and the loop
evaluate.py       forward-only passes
checkpointing.py  what a run saves and how it resumes
metrics.py  writers.py  timers.py     what is measured, where it goes, how long things take
microbatches.py   batch size ramp-up
leak_probe.py     before training: no token reaches what it must not reach
watch.py          signals, time limits, NaNs, profiler window
"""
