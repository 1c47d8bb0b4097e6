"""What a run saves, where it resumes from, and whether the two fit together."""
