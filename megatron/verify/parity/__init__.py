"""A layout against one rank: a small proxy config, short runs of both, and their difference."""
