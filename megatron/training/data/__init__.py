"""From datasets to microbatches: which samples a step reads, in which order, and how they are arranged."""
