"""Preference optimization: training on pairs of a chosen and a rejected answer.

settings.py    the flags, and what is wrong with them
rows.py        lines of JSON to pairs of ids
dataset.py     pairs as samples, packed
options.py     names of the losses, and what they are given
losses.py      DPO (Rafailov et al., 2023) and its variants, of one pair each
step.py        log-probabilities of answers, and the loss of a microbatch
data.py        the reference's log-probabilities, added to each global batch
arguments.py   the command line of finetune.py
"""
