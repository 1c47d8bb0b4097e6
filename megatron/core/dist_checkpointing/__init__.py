"""Global names and boxes to disk.

tree.py      which boxes of which global tensor this rank holds: parameters, and slots of the optimizer
source.py    a checkpoint of any dialect, seen as global tensors
rewrite.py   any source as a checkpoint of our own, offline, a tensor at a time
load.py      fill a tree from a source; find the newest checkpoint that is sound
saver.py     copy, write beside training, commit
plan.py      who writes which box
saved.py     an opened checkpoint of our own: a source that maps its files and verifies them
shard.py     one rank's data file
manifest.py  where every piece lies, and its hash
store.py     folders: what is committed, what is newest, what may go; needs no torch
files.py     the only door to the file system

Resharding is nobody's code: a checkpoint holds global tensors in boxes, and loading asks for other boxes.
"""
