"""What lets a user trust a run and its checkpoints.

plan/               memory and time of a run before it starts, and the layouts that fit
simulate/           the real training step without data, for every distinct kind of rank; would its collectives hang
parity/             a layout against one rank, on a small proxy config
compare/            two checkpoints or two runs side by side; a bad step repeated
flags/              a run's command as a config, repairs of what breaks a rule, parameter counts of a layout
doctor.py           whether machines are fit for a run, and whether its kernels compute what they should
providers.py        what the entry scripts give to a trainer, by architecture
state_inventory.py  every piece of mutable training state, and under which names it is saved
units.py            numbers with units, for people
"""
