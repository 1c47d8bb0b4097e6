"""Tools over checkpoints: inspect, verify, diff, convert, export, reshard, resume check."""
