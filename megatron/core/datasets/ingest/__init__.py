"""Text to .bin/.idx pairs, as a stream: what `tools/preprocess_data.py` does.

input_spans.py  what is read: a source, a span of it, a chunk of a span, a place in it
lines.py        files of lines and plain text, also compressed, and standard input
columns.py      parquet and arrow files
inputs.py       names and patterns to sources, cut into shards, read as chunks
records.py      chunks to texts; what cannot be read is counted and named
sentences.py    texts to sentences, by NLTK's Punkt; its English tables are in punkt/
encode.py       texts to ids
workers.py      threads and processes that encode, in the order of the input
journal.py      the lock on an output, and the journal from which a killed run goes on
pipeline.py     all of it together
"""
