"""What a trained language model is asked by others: log-likelihoods of continuations, and lm-evaluation-harness.

likelihood.py   how likely ids are after ids, and how they go on, under any layout
harness.py      lm-evaluation-harness's model `megatron`
plugin.py       names that model to lm-evaluation-harness when its own command line starts
"""
