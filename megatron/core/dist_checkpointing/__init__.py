"""Floor 3: global names and boxes to disk.

tree.py   which boxes of which global tensor this rank holds: parameters, and slots of the optimizer
dcp.py    save and load them through torch.distributed.checkpoint, which intersects boxes
store.py  folders: what is complete, what is newest, what may go; needs no torch

Resharding is nobody's code: a checkpoint holds global tensors in boxes, and loading asks for other boxes.
"""
