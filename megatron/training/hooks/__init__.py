"""What a run does beside its steps.

default.py        default_hooks: the hooks of every run, in their order
interval_log.py   the log line of an interval; writers.py: where its numbers go, also TensorBoard and Weights & Biases
evaluation.py     losses of validation and test data, and the best iteration
online.py         continuations of prompts, and scores of a benchmark
saving.py         when checkpoints are saved
progress_file.py  SAVE/progress.txt
run_record.py     the run log's first and last lines
"""
