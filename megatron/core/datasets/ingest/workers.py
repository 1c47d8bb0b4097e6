"""Chunks encoded in the order in which they come, by this process and its tokenizer's threads, or by processes.

    one worker     a thread reads and parses ahead:     [ read, parse ] -> queue -> [ encode ]
    more           a thread reads and sends in turn:    [ read, send ] -> worker k of n -> [ receive in turn ]

Only a few chunks are in memory at once. Each worker has its own pipes and shares no end of them with another: when this
process dies, however it dies, every worker finds its pipe closed and ends.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import queue
import signal
import threading
import traceback
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.ingest.encode import EncodedChunk, EncodeOptions, RecordEncoder
from megatron.core.datasets.ingest.input_spans import RecordChunk

DEPTH = 2  # chunks that wait for each stage
LOOK_AGAIN = 0.1  # seconds after which a thread that waits looks whether it is still wanted
PATIENCE = 5.0  # seconds for a worker to end by itself

Item = TypeVar("Item")


def encode_chunks(
    chunks: Iterator[RecordChunk], work: RecordEncoder | EncodeOptions, workers: int
) -> Generator[tuple[RecordChunk, EncodedChunk]]:
    """Yield each chunk, without its content, and its encoding, in order. work: an encoder to use if `workers` is 1."""
    if workers > 1:
        yield from _encode_by_processes(chunks, work.job if isinstance(work, RecordEncoder) else work, workers)
        return
    encoder = work if isinstance(work, RecordEncoder) else RecordEncoder(work)
    for chunk, records in read_ahead(
        (_record_chunk_without_bytes(chunk), encoder.parse_chunk(chunk)) for chunk in chunks
    ):
        yield chunk, encoder.encode_documents(records)


def _record_chunk_without_bytes(chunk: RecordChunk) -> RecordChunk:
    return dataclasses.replace(chunk, content=b"")


@dataclasses.dataclass(frozen=True, slots=True)
class _QueueEnd:
    """The last thing in a queue: nothing more comes, or this error."""

    error: BaseException | None


def read_ahead(items: Iterable[Item], depth: int = DEPTH) -> Iterator[Item]:
    """Yield the same items, fetched in advance by a thread; its exceptions are raised here. depth: items that may wait."""
    ready: queue.Queue = queue.Queue(depth)
    unwanted = threading.Event()

    def put_in_queue(item: Item | _QueueEnd) -> None:
        while not unwanted.is_set():
            try:
                return ready.put(item, timeout=LOOK_AGAIN)
            except queue.Full:
                continue

    def fill_queue() -> None:
        end = _QueueEnd(None)
        try:
            for item in items:
                put_in_queue(item)
                if unwanted.is_set():
                    break
        except BaseException as error:  # the consumer raises it
            end = _QueueEnd(error)
        put_in_queue(end)

    thread = threading.Thread(target=fill_queue, daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _QueueEnd):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        unwanted.set()
        thread.join(LOOK_AGAIN)  # a thread that waits for standard input is left behind


@dataclasses.dataclass(frozen=True, slots=True)
class _WorkerProcess:
    """A process, and our ends of its two pipes."""

    process: BaseProcess
    work: Connection
    results: Connection


def _encode_by_processes(
    chunks: Iterator[RecordChunk], job: EncodeOptions, count: int
) -> Iterator[tuple[RecordChunk, EncodedChunk]]:
    """As `encode_chunks`, by `count` worker processes, which take the chunks in turn. `DataError` if one is killed."""
    room = threading.Semaphore(DEPTH * count)
    unwanted = threading.Event()
    with _start_workers(job, count) as workers:

        def send_chunks_to_workers() -> Iterator[RecordChunk]:
            for number, chunk in enumerate(chunks):
                while not room.acquire(timeout=LOOK_AGAIN):
                    if unwanted.is_set():
                        return
                workers[number % count].work.send(chunk)
                yield _record_chunk_without_bytes(chunk)

        try:
            for number, chunk in enumerate(read_ahead(send_chunks_to_workers(), DEPTH * count)):
                result = workers[number % count].results.recv()
                room.release()
                if isinstance(result, Exception):
                    raise result
                yield chunk, result
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise DataError("a worker process was killed, perhaps for want of memory; try fewer --workers") from error
        finally:
            unwanted.set()


@contextmanager
def _start_workers(job: EncodeOptions, count: int) -> Iterator[list[_WorkerProcess]]:
    """Start `count` worker processes; they are ended when the block ends."""
    # Not forked: the threads of a tokenizer's engine do not survive a fork.
    context = multiprocessing.get_context("spawn")
    workers: list[_WorkerProcess] = []
    try:
        for _ in range(count):
            (work, ours), (theirs, results) = context.Pipe(duplex=False), context.Pipe(duplex=False)
            process = context.Process(target=_worker_main, args=(job, work, results), daemon=True)
            workers.append(_WorkerProcess(process, ours, theirs))
            process.start()
            work.close()
            results.close()
        yield workers
    finally:
        for worker in workers:
            worker.work.close()
            worker.results.close()
        for worker in workers:
            worker.process.join(PATIENCE)
            if worker.process.is_alive():
                worker.process.kill()


def _worker_main(job: EncodeOptions, work: Connection, results: Connection) -> None:
    """Run a worker process: encode chunks from `work` to `results` until the pipe closes; an error is sent as a result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, and closes the pipe
    try:
        encoder = RecordEncoder(job)
        while True:
            results.send(encoder.encode_documents(encoder.parse_chunk(work.recv())))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ConfigError, DataError) as error:
        results.send(error)
    except BaseException:  # a defect of ours is shown where it is seen, and a panic in Rust is no `Exception`
        results.send(RuntimeError(traceback.format_exc()))
