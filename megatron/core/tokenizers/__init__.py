"""Floor 2: text to ids and back.

base.py   what every tokenizer offers; padding of the vocabulary
bpe.py    GPT-2's byte-level BPE, from vocab.json and merges.txt
build.py  settings to tokenizer; the tokenizers that need no files
"""
