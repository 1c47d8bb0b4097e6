"""The command line: flags, help, the checks before a run starts, and the commands beside training.

arguments.py      a run's flags to a namespace, and from there to a checked config
help.py           --help of the scripts that train
legacy_flags.py   old spellings of flags; legacy_table.py: what becomes of each
preflight.py      whether a run can start: one ordered list of checks; device_checks.py: what it asks of the machine
verbs.py          `megatron <verb>`: the one command; former_names.py: what its verbs were called; __main__.py: starts it
command_names.py  the verbs of entry scripts, in messages of an installation
tool_parser.py    the parser of every command, and the options that several share
commands/         one verb a file
"""
