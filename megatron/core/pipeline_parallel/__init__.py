"""Pipeline parallelism. A schedule is data: a list of actions for each rank, which everything else reads.

schedules.py  Action, Plan, and the schedules: GPipe, 1F1B, interleaved 1F1B, zero bubble, forward only
timeline.py   simulate a plan without tensors: validity, bubble, peak activations, a drawing in text
transfers.py  the messages between ranks, in one order that all ranks derive; each rank's script
executor.py   run one rank's script: the only file here that touches tensors
picture.py    the timeline as PNG or SVG (needs matplotlib; nothing that trains imports it)
"""
