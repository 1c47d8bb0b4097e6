"""Text to ids and back.

base.py         what every tokenizer offers; the identity that is kept with its ids
bpe.py          GPT-2's byte-level BPE, from vocab.json and merges.txt
tiktoken.py     byte-level BPE from a rank file of tiktoken
huggingface.py  tokenizer.json, or the folder that holds it
bytelevel.py    what these three have in common; one identity for all ways of writing a vocabulary
engines.py      libraries that turn text to ids of a byte-level BPE, and the choice of the fastest
sample.py       difficult text, to prove engines equal
wordpiece.py    BERT's word pieces
sentencepiece.py SentencePiece models
build.py        settings to tokenizer; the tokenizers that need no files
"""
