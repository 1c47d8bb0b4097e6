"""Every rule between settings, as rows: what is refused, why, and what to do."""
