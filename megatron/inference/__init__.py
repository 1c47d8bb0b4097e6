"""Floor 6: decoding.

sampling.py  the next token from logits: greedy, temperature, top-k, top-p
generate.py  text in, text out, with the stages that training uses
"""
