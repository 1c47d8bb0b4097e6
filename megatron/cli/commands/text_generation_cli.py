"""Send prompts from the terminal to a text generation server, ours or Megatron's, until the end of the input (Ctrl-D).

python tools/text_generation_cli.py localhost:5000
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path

from megatron.cli.tool_parser import ToolArgumentParser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = ToolArgumentParser(description=__doc__, allow_abbrev=True)
    parser.add_argument(
        "server", metavar="HOST:PORT", help="where the server listens; may begin with http:// or https://"
    )
    parser.add_argument("--token-file", metavar="FILE", help="holds the token of the server, if it asks for one")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds to wait for an answer (default: 600)"
    )
    return parser.parse_args(argv)


def request_continuation(server: str, prompt: str, count: int, *, token: str, timeout: float) -> str:
    """Return the server's response: the prompt and what follows it, or a line that says what went wrong. count: tokens."""
    address = (server if "://" in server else f"http://{server}").rstrip("/") + "/api"
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    body = json.dumps({"prompts": [prompt], "tokens_to_generate": count}).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, body, headers, method="PUT"), timeout=timeout
        ) as answer:
            return "Megatron Response: \n" + json.load(answer)["text"][0]
    except urllib.error.HTTPError as error:
        return f"Error {error.code}: {message_of_error_body(error.read())}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"Error: {address} does not answer as a text generation server: {error}"


def message_of_error_body(body: bytes) -> str:
    """Return the message in a server's error body, of any of the usual forms."""
    try:
        reply = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()
    return str(reply["message"]) if isinstance(reply, dict) and "message" in reply else str(reply)


def main(argv: list[str] | None = None) -> None:
    """Ask the user for prompts and print the answers, until the input ends."""
    given = parse_arguments(argv)
    token = Path(given.token_file).read_text(encoding="utf-8").strip() if given.token_file else ""
    while True:
        try:
            prompt, count = input("Enter prompt: "), input("Enter number of tokens to generate: ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if not count.strip().isdecimal():
            sys.stdout.write(f"{count!r} is no number of tokens\n")
            continue
        sys.stdout.write(
            request_continuation(given.server, prompt, int(count), token=token, timeout=given.timeout) + "\n"
        )
