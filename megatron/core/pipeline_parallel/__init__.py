"""Pipelines as data.

A schedule is a list of actions a rank; everything else reads that list.

schedules.py  Action, Plan, and the schedules: gpipe, 1F1B, interleaved 1F1B, forward only
timeline.py   play a plan without tensors: check it, its bubble, its peak memory, its picture in text
transfers.py  what crosses ranks, in one order that all ranks derive; each rank's script
executor.py   walk one rank's script: the only file here that touches tensors
picture.py    the timeline as PNG or SVG (needs matplotlib; nothing that trains imports it)
"""
