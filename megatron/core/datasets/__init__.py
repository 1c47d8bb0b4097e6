"""Floor 3: ids to samples. numpy only, so that tools start quickly; `samplers.py` alone needs torch.

    text --tools/preprocess_data.py--> PREFIX.bin + PREFIX.idx --GPTDataset--> token windows --sampler--> micro batches

indexed.py     the .bin/.idx pair, read and written; `DataError`
index_map.py   sequences to samples: the document, sample and shuffle index, and their cache on disk
gpt.py         token windows with labels, loss mask and positions
mock.py        a source of made-up tokens, without files
blend_index.py which dataset of a blend each sample comes from
paths.py       what the data settings say: prefixes, weights and splits
blend.py       mixed datasets; `build_datasets` makes the datasets of a run
samplers.py    which samples come next, from the number of consumed samples alone
"""
