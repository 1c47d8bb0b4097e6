"""Which kernel computes each op of a run.

table.py             the Kernels record, and select_kernels(): the best candidate for each op, with reasons
run_requirements.py  what a run's kernels must support
kernel_check.py      a trial of each op against its definition
startup_check.py     a run's kernels, with defaults that passed their trials
"""
