"""The settings of a run as frozen dataclasses; every field is a flag."""
