"""Memory and time of a run before it starts: cost model, hardware profiles, search over layouts, report."""
