"""Tools over checkpoints: inspect, verify, diff, convert, export, adapters, reshard, resume check."""
