"""Detects dead ranks: each keeps a TCP connection to the first rank, which the system closes when its process ends.

    with watch_ranks(mesh, address) as liveness:     # on all ranks together
        liveness.lost_rank_text                      # on the first: "rank 1 of 2 (process 4711 on host) has ended", or nothing

A collective notices a dead rank only while one is running, sometimes never, and does not say which rank it was.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from megatron.core.config.flags.declare import ConfigError
from megatron.core.parallel import collectives
from megatron.core.parallel.mesh import Mesh

_JOIN_SECONDS, _HELLO_SECONDS = 60.0, 5.0


class RankLiveness:
    """Which rank died first, as the first rank sees it. lost_rank_text: in words; "" while all live, with one rank, and
    on other ranks.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self._watches, self.lost_rank_text = False, ""

    def wait_for_loss(self, seconds: float) -> str:
        """Wait up to so many seconds for a rank to be found dead, and return `lost_rank_text`: that may be noticed
        after the failure that it explains.
        """
        if self._watches:
            self._news.wait(seconds)
        return self.lost_rank_text

    def watch(self, ranks: dict[socket.socket, str], over: socket.socket) -> None:
        """Thread: wait until the connection of a rank closes, or `over` does, which ends the watching."""
        self._watches = True
        with selectors.DefaultSelector() as selector:
            for connection in (*ranks, over):
                selector.register(connection, selectors.EVENT_READ)
            ended = {key.fd for key, _ in selector.select()}
        gone = [name for connection, name in ranks.items() if connection.fileno() in ended]
        if gone and over.fileno() not in ended:
            self.lost_rank_text = f"{gone[0]} has ended"
            self._news.set()


@contextmanager
def watch_ranks(mesh: Mesh, address: str) -> Iterator[RankLiveness]:
    """Watch on the first rank whether all ranks are alive. Collective at entry and exit.
    address: of the first rank's machine. Raises `ConfigError` if a rank cannot reach the first.
    """
    liveness, axis = RankLiveness(), mesh.world
    if axis.size == 1:
        yield liveness
        return
    with ExitStack() as stack:
        if axis.is_first:
            ranks = accept_rank_connections(axis.size, lambda line: collectives.broadcast_object(line, axis), stack)
            here, there = (stack.enter_context(end) for end in socket.socketpair())
            watching = threading.Thread(target=liveness.watch, args=(ranks, there), name="rank liveness", daemon=True)
            watching.start()
            try:
                yield liveness
            finally:
                here.close()  # which ends the watching
                watching.join()
        else:
            port, secret = collectives.broadcast_object(None, axis)
            stack.enter_context(_connect_to_first((address, port), secret, f"rank {axis.rank} of {axis.size}"))
            yield liveness


def accept_rank_connections(
    size: int, tell: Callable[[tuple[int, str]], object], stack: ExitStack
) -> dict[socket.socket, str]:
    """On the first rank: accept a TCP connection from every other rank; return connection -> its name. `ConfigError`
    after a time limit. tell: sends (port, secret) to the others. stack: closes the connections.
    """
    secret, ranks = secrets.token_hex(16), dict[socket.socket, str]()
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    end = time.monotonic() + _JOIN_SECONDS
    with socket.create_server(("", 0), family=family, backlog=size, dualstack_ipv6=family == socket.AF_INET6) as door:
        tell((door.getsockname()[1], secret))
        while len(ranks) < size - 1:
            door.settimeout(max(0.01, end - time.monotonic()))
            try:
                connection, _ = door.accept()
            except TimeoutError:
                raise ConfigError(
                    f"{size - 1 - len(ranks)} of {size} ranks did not reach the first within {_JOIN_SECONDS:.0f} s; can they "
                    f"connect to port {door.getsockname()[1]} of its machine?"
                ) from None
            stack.enter_context(connection)
            words = _receive_first_line(connection).split(" ", 1)
            if secrets.compare_digest(words[0].encode(), secret.encode()) and len(words) == 2:  # and no stranger
                ranks[connection] = words[1].strip()
    return ranks


def _receive_first_line(connection: socket.socket) -> str:
    """The first line that a connection sends; "" after a time limit."""
    try:
        connection.settimeout(_HELLO_SECONDS)
        with connection.makefile("rb") as lines:
            return lines.readline(1000).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        connection.settimeout(None)


def _connect_to_first(address: tuple[str, int], secret: str, name: str) -> socket.socket:
    """On another rank: connect to the first and send secret and name."""
    try:
        connection = socket.create_connection(address, timeout=_JOIN_SECONDS)
    except OSError as error:
        raise ConfigError(f"{name} cannot reach the first at {address[0]} port {address[1]}: {error}") from error
    connection.settimeout(None)
    connection.sendall(f"{secret} {name} (process {os.getpid()} on {socket.gethostname()})\n".encode())
    return connection
