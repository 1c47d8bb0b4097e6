"""The real training step without data, for every distinct kind of rank: operations, storage lifetimes, collectives."""
