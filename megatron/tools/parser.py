"""The parser of every tool: one line of usage, and errors that end with where to look."""

from __future__ import annotations

import argparse
from typing import NoReturn


class ToolParser(argparse.ArgumentParser):
    """argparse's parser with a usage of one line: what must be given, and that there is more."""

    def format_usage(self) -> str:
        """The line, with its end."""
        self.usage = self._usage_line()
        return super().format_usage()

    def format_help(self) -> str:
        """The line, the description and the groups of options."""
        self.usage = self._usage_line()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where to look, and exit with 2."""
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n--help says what each option takes\n")

    def _usage_line(self) -> str:
        words = []
        for action in self._actions:
            name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            if not action.option_strings:
                words.append(name if action.nargs not in ("*", "?") else f"[{name}]")
            elif action.required:
                words.append(f"{action.option_strings[0]} {name}")
        return " ".join([self.prog, *words, "[options]"]).replace("%", "%%")
