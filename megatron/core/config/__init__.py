"""What the user asked for, as frozen dataclasses, and the rules between settings. Imports nothing of ours and no torch.

flags.py            a config field and its command-line flag are one thing
settings/           model, experts, parallel layout, optimizer, data, run; `RunConfig` (settings/run.py) holds all of them
rules/              every rule between settings, as rows; engine.py asks them all
plan.py             one row per layer, and which layers each pipeline stage builds
layer_frequency.py  patterns that say which layers have a property
"""
