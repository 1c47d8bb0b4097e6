"""Floor 4: the update of the weights.

groups.py    weight decay and learning-rate groups
clip.py      norm and zeros of the gradient, each element of the network counted once
scaler.py    constant and dynamic loss scale
optimizer.py fp32 masters, one step over what this rank owns, skipped steps
schedule.py  learning rate and weight decay by sample
"""
