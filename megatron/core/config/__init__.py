"""What the user asked for, as frozen dataclasses, and the rules between settings. Imports nothing of ours and no torch.

flags/     a config field and its command-line flag are one thing
settings/  model, experts, parallel layout, optimizer, data, run; `RunConfig` (settings/run.py) holds all of them
mixers/    what each kind of sequence mixer needs and costs
plan/      one row per layer, which layers each pipeline stage builds, and which settings make a network's function
rules/     every rule between settings, as rows; engine.py asks them all
foreign/   settings of other projects' files, read key by key
"""
