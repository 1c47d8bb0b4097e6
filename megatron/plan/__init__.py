"""Memory and time of a run before it starts, and the layouts that fit. Works on a computer without GPUs.

command.py            a launcher's command line as a checked config
setup.py              what a user gave to a run, and which rules it breaks
repair.py             changes of one flag that keep a broken rule
analytic_estimate.py  parameters and memory by formulas, without building anything
layer_profile.py      dry runs of single layers; stage_estimate.py: what a layout takes, from them
hardware.py           what machines can do; measure.py: measures this one
cost.py               seconds of recorded operations and messages
layout_search.py      layouts in order of their estimated time; planner.py: dry run, cost and memory of one layout
report.py             the plan as text, and as a page from report.html
units.py              numbers with units, for people
simulate/             the real training step without data, for every distinct kind of rank
"""
