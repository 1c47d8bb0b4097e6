"""Tokenizers: text to token ids and back.

base.py               the interface of every tokenizer, and the fingerprint that is stored with its ids
bpe.py                GPT-2's byte-level BPE, from vocab.json and merges.txt
tiktoken.py           byte-level BPE from a tiktoken rank file
huggingface.py        tokenizer.json, or the folder that holds it
tokenizer_config.py   the files beside a tokenizer.json, as transformers reads them
generation_config.py  generation_config.json: what ends a text, and how tokens are sampled
bytelevel.py          the common part of these three, and one fingerprint for all formats of a vocabulary
engines.py            libraries that encode text with a byte-level BPE, and the choice of the fastest
difficult_texts.py    difficult text, to verify that engines agree
wordpiece.py          BERT's WordPiece
sentencepiece.py      SentencePiece models
build.py              settings to tokenizer; the tokenizers that need no files
incremental.py        the text of ids that come one by one
check.py              checks of a tokenizer on difficult text and on a corpus
train.py              training of new vocabularies
"""
