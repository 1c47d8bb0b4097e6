"""A config field and its command-line flag are one thing.

declare.py        `flag(default, help, role=..., used_with=...)`, and the errors of settings
when.py           conditions without which a flag has no effect, on other settings and on facts of the run
idle.py           which settings have none in a run
parse.py          values with a syntax of their own: patterns that say which layers have a property
bounded_regex.py  a user's regular expression, in bounded time
figures.py        names of the figures that a run reports
"""
