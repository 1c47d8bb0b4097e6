"""Parquet files and Hugging Face's arrow files as chunks of rows, read batch by batch through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron.core.config.flags.declare import ConfigError
from megatron.core.datasets.indexed import DataError
from megatron.core.datasets.ingest.input_spans import CHUNK_BYTES, InputFile, InputFileSpan, InputPosition, RecordChunk

if TYPE_CHECKING:
    import pyarrow

ARROW_FILE_MAGIC = b"ARROW1"  # Feather and IPC files; those of Hugging Face are IPC streams, without it
READ_BYTES = 2**16


@contextmanager
def _open_table_file(source: InputFile) -> Iterator[pyarrow.NativeFile]:
    """Open a Parquet or Arrow file. pyarrow's errors inside become `DataError`; `ConfigError` without pyarrow."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(f"{source.path} needs the package pyarrow: pip install pyarrow") from error
    # pyarrow's own pool keeps freed memory; the system's gives it back.
    memory = pyarrow.system_memory_pool()
    pyarrow.set_memory_pool(memory)
    try:
        with pyarrow.OSFile(source.path, "rb") as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source.path} is damaged, or not a {source.kind} file: {error}") from error


def count_table_rows(source: InputFile) -> int:
    """The number of rows of a table."""
    with _open_table_file(source) as file:
        if source.kind == "parquet":
            from pyarrow import parquet

            return parquet.ParquetFile(file).metadata.num_rows
        return sum(batch.num_rows for batch, _, _ in _arrow_batches(source, file, (), 0))


def read_table_chunks(
    number: int, span: InputFileSpan, place: InputPosition, keys: Sequence[str]
) -> Iterator[RecordChunk]:
    """Yield chunks of a span's rows with the columns `keys`, from `place` on. number: the span's index in the run."""
    source = span.source
    first = max(place.unit, span.start)
    with _open_table_file(source) as file:
        find = _parquet_batches if source.kind == "parquet" else _arrow_batches
        for batch, at, consumed in find(source, file, keys, first):
            skipped = max(0, first - at)
            stop = batch.num_rows if span.stop is None else min(batch.num_rows, span.stop - at)
            rows = max(1, CHUNK_BYTES * max(1, batch.num_rows) // max(1, batch.nbytes))
            for low in range(skipped, stop, rows):
                piece = batch.slice(low, min(rows, stop - low))
                texts = [_column_to_bytes(piece.column(key)) for key in keys]
                start, end = (
                    InputPosition(number, row, row - span.start) for row in (at + low, at + low + piece.num_rows)
                )
                size = sum(len(text) for column in texts for text in column if text is not None)
                yield RecordChunk(source.kind, texts, start, end, size, consumed)
            if span.stop is not None and at + batch.num_rows >= span.stop:
                return


def _parquet_batches(
    source: InputFile, file: pyarrow.NativeFile, keys: Sequence[str], first: int
) -> Iterator[tuple[pyarrow.RecordBatch, int, int]]:
    """Yield (batch, number of its first row, bytes before its end), from the row group that holds row `first` on."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=READ_BYTES)
    _check_columns(source, table.schema_arrow, keys)
    row = 0
    for group in range(table.num_row_groups):
        facts = table.metadata.row_group(group)
        if row + facts.num_rows <= first:
            row += facts.num_rows
            continue
        rows = max(1, CHUNK_BYTES * facts.num_rows // max(1, facts.total_byte_size))
        for batch in table.iter_batches(rows, [group], list(keys), use_threads=False):
            after = row + batch.num_rows
            yield batch, row, source.size * after // max(1, table.metadata.num_rows)
            row = after


def _arrow_batches(
    source: InputFile, file: pyarrow.NativeFile, keys: Sequence[str], first: int
) -> Iterator[tuple[pyarrow.RecordBatch, int, int]]:
    """As `_parquet_batches`, for an Arrow IPC stream or file; all earlier batches are read to find row `first`."""
    from pyarrow import ipc

    is_file = file.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    _check_columns(source, reader.schema, keys)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    row = 0
    for batch in batches:
        if row + batch.num_rows > first:
            yield batch.select(list(keys)), row, file.tell()
        row += batch.num_rows


def _check_columns(source: InputFile, schema: pyarrow.Schema, keys: Sequence[str]) -> None:
    """Raise `DataError` if a column is missing, occurs twice, or holds no text."""
    from pyarrow import types

    for key in keys:
        result = schema.get_all_field_indices(key)
        if len(result) != 1:
            raise DataError(
                f"{source.path} has {len(result) or 'no'} columns {key!r}; it has {', '.join(schema.names)}: "
                "name one of them with --json-keys"
            )
        kind = schema.field(result[0]).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
            raise DataError(f"{source.path}: column {key!r} holds {kind}, not text; name another with --json-keys")


def _column_to_bytes(column: pyarrow.Array) -> list[bytes | None]:
    """Return the texts of a column as bytes, not checked to be UTF-8; None for a null."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pyarrow.large_binary()).to_pylist()
