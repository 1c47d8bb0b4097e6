"""What the user said, as frozen dataclasses. Pure data; imports nothing of ours and no torch.

flags.py     a config field and its command-line flag are one thing
model.py     what the network is
plan.py      one row per layer, and which layers each pipeline stage builds
parallel.py  how ranks are divided
optim.py     optimizer, schedule, precision
data.py      data and tokenizer
compilation.py  whether layers are compiled, and how; graphs.py: or recorded as CUDA graphs
run.py       training, checkpoints, logging; `RunConfig` holds all of them
rules.py     every rule between settings, as rows
attention_rules.py  rows about attention and positions
"""
