"""A click log in a file (parquet, or delimited text, gzipped or not) -> columns of inputs, chunk by chunk.

Rows are in the order of the time column if one is named (stable), else in the file's. A null, and a NaN in a
number, mean not given. An id is a string or an integer; a list of ids is an Arrow list, or text split at spaces.
"""

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from trainer.errors import SettingsError
from trainer.events import InputColumn, Inputs
from trainer.hashing import hash_integers, hash_texts
from trainer.schema import Input, Schema

CHUNK_ROWS = 65_536
LIST_TYPES = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
TRUE_WORDS, FALSE_WORDS = {"1", "true", "yes"}, {"0", "false", "no"}


@dataclass(frozen=True)
class Chunk:
    """Up to CHUNK_ROWS rows: inputs, labels_B float32 (0 or 1), time_ms_B int64 (0: no time column)."""

    inputs: Inputs
    labels_B: npt.NDArray[np.float32]
    time_ms_B: npt.NDArray[np.int64]


def read_table(path: Path, *, time: str | None = None, max_rows: int | None = None) -> pa.Table:
    """Read a file whole, sorted by time if a time column is named.

    Raises:
        SettingsError: the file cannot be read, or has no such column.
    """
    try:
        table = _read(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise SettingsError("data", got=str(path), wanted=f"a readable parquet or CSV file ({error})") from None
    if time is not None:
        _require(table, time, "time")
        order = pc.sort_indices(pc.cast(table[time], pa.float64()).combine_chunks())  # stable, as Arrow documents
        table = table.take(order)
    return table.slice(0, max_rows) if max_rows is not None else table


def chunks(schema: Schema, table: pa.Table, *, label: str, time: str | None) -> Iterator[Chunk]:
    """Cut a table into chunks of inputs, labels and times.

    Raises:
        SettingsError: a column is missing, or holds what its feature cannot read.
    """
    _require(table, label, "label")
    for spec in schema.inputs:
        _require(table, spec.name, f"features (input {spec.name})")
    for start in range(0, table.num_rows, CHUNK_ROWS):
        part = table.slice(start, CHUNK_ROWS).combine_chunks()
        columns = {spec.name: _input(spec, part[spec.name]) for spec in schema.inputs}
        times = np.zeros(part.num_rows, np.int64)
        if time is not None:
            times = pc.cast(pc.fill_null(part[time], 0), pa.int64(), safe=False).to_numpy()
        yield Chunk(Inputs(part.num_rows, columns), _labels(schema, label, part[label]), times)


def _read(path: Path) -> pa.Table:
    if path.suffix == ".parquet":
        return pa.parquet.read_table(path)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        header = file.readline()
    delimiter = csv.Sniffer().sniff(header, ",;\t|").delimiter if len(header) > 1 else ","
    options = pa.csv.ParseOptions(delimiter=delimiter)
    return pa.csv.read_csv(path, parse_options=options)


def _require(table: pa.Table, name: str, field: str) -> None:
    if name not in table.column_names:
        raise SettingsError(field, got=name, wanted=f"a column of the file: {', '.join(table.column_names)}")


def _labels(schema: Schema, name: str, column: Any) -> npt.NDArray[np.float32]:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        lowered = [str(value).lower() for value in column.to_pylist()]
        bad = next((value for value in lowered if value not in TRUE_WORDS | FALSE_WORDS), None)
        if bad is not None:
            raise SettingsError("label", got=bad, wanted=f"0 or 1, true or false, yes or no in column {name}")
        return np.array([value in TRUE_WORDS for value in lowered], np.float32)
    values: npt.NDArray[np.float64] = pc.cast(column, pa.float64()).to_numpy()
    if schema.label_threshold is not None:
        values = np.where(np.isnan(values), np.nan, values >= schema.label_threshold)
    bad_rows = np.flatnonzero((values != 0) & (values != 1))
    if len(bad_rows):
        wanted = f"0 or 1 in column {name} (or set label.threshold)"
        raise SettingsError("label", got=float(values[bad_rows[0]]), wanted=wanted)
    return values.astype(np.float32)


def _input(spec: Input, column: Any) -> InputColumn:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if spec.kind == "number":
        return _numbers(spec, array)
    given = None if array.null_count == 0 else np.asarray(array.is_valid())
    array = array.drop_null()
    if spec.kind == "id":
        return InputColumn(given, ids=_ids(spec, array))
    if pa.types.is_string(array.type):
        array = pc.utf8_split_whitespace(array)
    if not (
        pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type)
    ):
        raise SettingsError(f"features (input {spec.name})", got=str(array.type), wanted="a column of lists")
    lengths = np.asarray(pc.list_value_length(array)).astype(np.int32)
    values = array.flatten()
    if spec.kind == "vector":
        if (lengths != spec.size).any():
            raise SettingsError(f"features (input {spec.name})", got=int(lengths.max()), wanted=f"{spec.size} numbers")
        return InputColumn(given, numbers=np.asarray(pc.cast(values, pa.float64())))
    if lengths.max(initial=0) > spec.size:
        wanted = f"at most {spec.size} items (max_length)"
        raise SettingsError(f"features (input {spec.name})", got=int(lengths.max()), wanted=wanted)
    return InputColumn(given, ids=_ids(spec, values), lengths=lengths)


def _numbers(spec: Input, array: Any) -> InputColumn:
    try:
        values = np.asarray(pc.cast(array, pa.float64()).fill_null(float("nan")))
    except pa.ArrowInvalid as error:
        raise SettingsError(f"features (input {spec.name})", got=str(array.type), wanted=f"numbers ({error})") from None
    given = np.isfinite(values)
    return InputColumn(None if given.all() else given, numbers=values[given])


def _ids(spec: Input, array: Any) -> npt.NDArray[np.int64]:
    """Ids of an Arrow array without nulls: text is hashed where it lies."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_floating(array.type) or pa.types.is_boolean(array.type):
        try:  # integers that a null made into floats; a real fraction is no id
            array = pc.cast(array, pa.int64())
        except pa.ArrowInvalid:
            wanted = "strings or integers; use a transform for numbers"
            raise SettingsError(f"features (input {spec.name})", got=str(array.type), wanted=wanted) from None
    if pa.types.is_integer(array.type):
        return hash_integers(np.asarray(pc.cast(array, pa.int64())).copy())
    array = pc.cast(array, pa.large_string())
    if len(array) == 0:
        return np.empty(0, np.int64)
    _, offsets, text = array.buffers()
    ends = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1].copy()
    return hash_texts(np.frombuffer(text, np.uint8).copy(), ends)
