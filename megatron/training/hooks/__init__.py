"""What a loop does beside its steps.

writers.py     the log line, TensorBoard and Weights & Biases
run_record.py  the run log's first and last lines
"""
