"""The commands beside training, one a file. The scripts in tools/ start them, as do the installed commands."""
