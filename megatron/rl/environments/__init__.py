"""Tasks with a reward. `base.Environment` is what one's own task derives from; `config.py` reads --langrl-env-config."""
