"""What lets a user trust a run and its checkpoints.

contents.py   what a checkpoint holds, as names, shapes, sizes and boxes; needs no torch for our own format
compare.py    two tensors, or two checkpoints of any layout and dialect: where they differ, and by how much
command.py    the words of a run's command, as a setting that rules can look at
edits.py      the fewest changes of flags that make a configuration keep every rule
rule_page.py  the page of all rules, made from their rows
built.py      what a layout builds, against what the arithmetic says
dry_run.py    the real training step without data, for every distinct kind of rank; trace.py has its records
blank.py      its microbatches: shaped as the run's, and nothing in them
recorder.py  fake.py  memory.py     operations as events; tensors without data; what lives when, and why a rank is worst
ledger.py     two runs laid beside each other: where they part, and what they were given that differs
doctor.py  kernel_check.py     whether machines are fit for a run, and whether its kernels compute what they should
shrink.py  rehearsal.py  ranks.py  parity.py     a config made small, and its layout against one rank
matching.py   every rank's collectives and messages against each other's, and who would wait for whom
inventory.py  every piece of mutable training state, and under which names it is saved
"""
