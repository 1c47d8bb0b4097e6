"""Floor 4: the update of the weights.

groups.py      weight decay and learning-rate groups; which parameters are Muon's
clip.py        norm and zeros of the gradient, each element of the network counted once
scaler.py      constant and dynamic loss scale
optimizer.py   fp32 masters, one step over what this rank owns, skipped steps
elementwise.py AdamW, SGD, Lion
adafactor.py   Adafactor over any layout
muon.py        Muon over any layout; orthogonal.py the mathematics, owners.py who works on what
narrow.py      AdamW whose state is kept in fewer bits; formats.py how
offload.py     masters and moments in the memory of the CPU
schedule.py    learning rate and weight decay by sample
"""
