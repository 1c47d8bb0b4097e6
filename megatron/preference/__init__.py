"""Preference optimization: training on pairs of a chosen and a rejected answer.

settings.py         the flags, and what is wrong with them
rows.py             lines of JSON to pairs of ids
dataset.py          pairs as samples, packed
losses.py           DPO (Rafailov et al., 2023) and its variants, of one pair each
step.py             log-probabilities of answers, and the loss of a microbatch
data.py             the reference's log-probabilities, added to each global batch
arguments.py        the command line of finetune.py
reference_cache.py  what a reference says of the answers of a file, kept on disk
planned_memory.py   bytes beside the policy in training, by formulas
"""
