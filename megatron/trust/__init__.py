"""Floor 7: what lets a user trust a run and its checkpoints.

contents.py   what a checkpoint holds, as names, shapes, sizes and boxes; needs no torch for our own format
compare.py    two tensors, or two checkpoints of any layout and dialect: where they differ, and by how much
command.py    the words of a run's command, as a setting that rules can look at
edits.py      the fewest changes of flags that make a configuration keep every rule
rule_page.py  the page of all rules, made from their rows
built.py      what a layout builds, against what the arithmetic says
inventory.py  every piece of mutable training state, and under which names it is saved
"""
