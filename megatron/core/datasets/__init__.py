"""Ids to samples. numpy only, so that tools start quickly; `samplers.py` alone needs torch.

    text --tools/preprocess_data.py--> PREFIX.bin + PREFIX.idx --GPTDataset--> token windows --sampler--> micro batches

storage.py            files and object storage: bytes by range, whole, or mapped; `DataError`
sidecar.py            PREFIX.json beside a pair: tokenizer, counts, checksums
indexed.py            the .bin/.idx pair, read and written
bin_idx_check.py      a pair read from end to end: everything that is wrong with it
index_map.py          sequences to samples: the document, sample and shuffle index, and their cache on disk
dataset_protocols.py  what every kind of data set offers: samples, and where each came from
gpt.py                token windows with labels, loss mask and positions
fim.py                fill in the middle: documents of a window rearranged
chat.py               conversations packed into samples, with loss on the answers
conversations.py      from JSONL to the ids of conversations, kept on disk
templates.py          how a conversation is written down, and which text of it is an answer
packing.py            which conversations share a sample
special_tokens.py     tokens by their name, and what a tokenizer puts around text
sentence_map.py       sentences to samples: which run of sentences each sample is made of
masking.py            which tokens are hidden, and what stands in their place
bert.py               pairs of texts with hidden words
t5.py                 texts with spans taken out
mock.py               made-up tokens and conversations, without files
blend_index.py        which dataset of a blend each sample comes from
data_splits.py        what the data settings say: prefixes, weights and splits
kinds.py              which kind of data set the settings ask for
blend.py              mixed datasets; `build_split_datasets` makes the datasets of a run
samplers.py           which samples come next, from the number of consumed samples alone
"""
