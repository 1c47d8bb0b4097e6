"""The command-line tools. The scripts in tools/ at the top level start them, as do the installed commands."""
