"""Global names of parameters that several files use."""

from __future__ import annotations

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
SCORE = "score.weight"  # of a reward model, which has no output layer
VOCABULARY = frozenset((WORD_EMBEDDING, OUTPUT, "output_layer.bias"))  # parameters with a row for each token id
