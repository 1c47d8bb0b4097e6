"""What lets a user trust a run and its checkpoints.

parity/             a layout against one rank, on a small proxy config
compare/            two checkpoints or two runs side by side; a bad step repeated
doctor.py           whether machines are fit for a run, and whether its kernels compute what they should
state_inventory.py  every piece of mutable training state, and under which names it is saved
rule_page.py        the page of all rules between settings, docs/rules.md
"""
