"""Floor 7: what lets a user trust a run and its checkpoints.

contents.py   what a checkpoint holds, as names, shapes, sizes and boxes; needs no torch for our own format
compare.py    two tensors, or two checkpoints of any layout and dialect: where they differ, and by how much
inventory.py  every piece of mutable training state, and under which names it is saved
"""
