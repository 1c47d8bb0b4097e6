"""Global names of parameters that more than one file speaks of."""

from __future__ import annotations

WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
VOCABULARY = frozenset((WORD_EMBEDDING, OUTPUT, "output_layer.bias"))  # those with a row for each id
