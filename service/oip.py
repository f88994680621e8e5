"""The Open Inference Protocol's view of the model: one tensor an input, B rows each, and one output, `score`.

| input of the configuration | shape         | announced | taken as well | padding |
| -------------------------- | ------------- | --------- | ------------- | ------- |
| categorical                | [B]           | BYTES     | INT64, INT32  |         |
| list                       | [B, n], n <= max_length | BYTES | INT64, INT32 | "" or -1, dropped wherever it stands |
| number                     | [B]           | FP64      | FP32, INT64, INT32 |    |
| vector                     | [B, width]    | FP32      | FP64          |         |
| `$time_ms`                 | [1]           | INT64     |               |         |

[B, 1] is taken for [B]. BYTES are UTF-8, and an integer is the same id as its decimal text. An input that is left out
is missing in all rows, which is filled in as everywhere: from what is known of the entity, else by its meaning.
`$time_ms` is the time to score for; without it, now. Rows of the same values have the same bits as from `/v1/score`.

The model's name is the configuration's; its version is the one that is live, and `latest` is another name of that.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.errors import ServiceError, Violation, too_many
from service.live_model import Candidates, Stamp
from service.tensors import BYTES, Tensor, Texts, invalid
from service.wire import Requests
from trainer.event_json import MAX_MAGNITUDE, MAX_TIME_MS
from trainer.events import InputColumn, Inputs
from trainer.hashing import hash_integers
from trainer.schema import Input, InputKind

SERVER = "livebed"
EXTENSIONS = ("binary_tensor_data",)
LATEST = "latest"
TIME = "$time_ms"
SCORE = "score"
INTEGERS = ("INT64", "INT32")
# The first is what the metadata announces.
DATATYPES: dict[InputKind, tuple[str, ...]] = {
    "id": (BYTES, *INTEGERS),
    "ids": (BYTES, *INTEGERS),
    "number": ("FP64", "FP32", *INTEGERS),
    "vector": ("FP32", "FP64"),
}
PADDING = -1  # in a list of integers; in one of BYTES it is the empty text
NOT_HERE = ("classification", "shared_memory_region")  # parameters that would change an answer, and do not here


@dataclass(frozen=True)
class TensorSpec:
    """What the metadata says of one tensor; -1 is the number of rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]


SCORE_SPEC = TensorSpec(SCORE, "FP32", (-1,))


class Tensors:
    """Reads requests of one schema, within its limits. Everything here raises ServiceError."""

    def __init__(self, model: str, requests: Requests) -> None:
        self.model = model
        self._requests = requests
        self._inputs = {spec.name: spec for spec in requests.schema.inputs}

    @property
    def input_specs(self) -> list[TensorSpec]:
        """What a request may give."""
        specs = [TensorSpec(spec.name, DATATYPES[spec.kind][0], _shape(spec)) for spec in self._inputs.values()]
        return [*specs, TensorSpec(TIME, "INT64", (1,))]

    def check_model(self, name: str) -> None:
        """Refuse a model that is not the one here."""
        if name != self.model:
            raise ServiceError("unknown_model", f"there is no model {name[:64]!r}; the model here is {self.model!r}")

    def candidates(self, tensors: Sequence[Tensor]) -> Candidates:
        """The rows of a request, by column."""
        given = {tensor.name: tensor for tensor in tensors}
        if len(given) != len(tensors):
            raise _refused("a tensor's name stands twice")
        time_ms = _time_ms(given.pop(TIME, None))
        if not given:
            raise _refused(f"a request needs at least one tensor beside {TIME}")
        first = next(iter(given.values()))
        count, limit = first.shape[0], self._requests.limits.candidates
        if count > limit:
            raise too_many("candidates", count, limit)
        columns = {}
        for tensor in given.values():
            if tensor.shape[0] != count:
                raise invalid(tensor.name, f"{tensor.shape[0]} rows, but {first.name[:64]!r} has {count}")
            columns[tensor.name] = self._column(self._input(tensor.name), tensor, count)
        return self._requests.checked(Candidates(Inputs(count, columns), None, time_ms))

    def _input(self, name: str) -> Input:
        spec = self._inputs.get(name)
        if spec is None:
            detail = f"{name[:64]!r} is no input of the model; inputs: {', '.join(self._inputs)}, {TIME}"
            raise ServiceError("unknown_feature", detail, violations=[Violation(f"/inputs/{name[:64]}", detail)])
        return spec

    def _column(self, spec: Input, tensor: Tensor, count: int) -> InputColumn:
        _check_datatype(tensor, DATATYPES[spec.kind])
        _check_shape(tensor, spec)
        values = tensor.values
        if isinstance(values, Texts):
            problem = values.problem(self._requests.limits.string_chars)
            if problem is not None:
                raise invalid(spec.name, problem)
        elif spec.kind in {"number", "vector"}:
            numbers = values.astype(np.float64)
            if not np.abs(numbers).max(initial=0.0) <= MAX_MAGNITUDE:  # false for NaN too
                raise invalid(spec.name, f"a number is not finite, or past {MAX_MAGNITUDE:g}")
            return InputColumn(numbers=numbers)
        if isinstance(values, Texts):
            ids, is_given = values.ids_N(), values.lengths_N > 0
        else:
            ids, is_given = hash_integers(values.astype(np.int64)), values != PADDING
        if spec.kind == "id":
            return InputColumn(ids=ids)
        lengths = is_given.reshape(count, tensor.shape[1]).sum(axis=1, dtype=np.int32)
        return InputColumn(ids=ids[is_given], lengths=lengths)


def check_version(version: str, stamp: Stamp) -> None:
    """Refuse a version that is not the live one; "" and "latest" are. Raises ServiceError."""
    if version not in {"", LATEST, str(stamp.version)}:
        detail = f"version {version[:32]!r} is not live; {stamp.version} is, and {LATEST!r} always names the live one"
        raise ServiceError("unknown_version", detail)


def check_output(name: str) -> None:
    """Refuse an output that there is none of. Raises ServiceError."""
    if name != SCORE:
        raise _refused(f"there is no output {name[:64]!r}; the output is {SCORE!r}")


def check_parameter(name: str) -> None:
    """Refuse a parameter of a tensor that asks for another protocol's answer. Raises ServiceError."""
    if name in NOT_HERE:
        raise _refused(f"the parameter {name!r} belongs to an extension that is not spoken here")


def _shape(spec: Input) -> tuple[int, ...]:
    return (-1, spec.size) if spec.kind in {"ids", "vector"} else (-1,)


def _check_datatype(tensor: Tensor, wanted: Sequence[str]) -> None:
    if tensor.datatype not in wanted:
        raise invalid(tensor.name, f"datatype is {tensor.datatype}, wanted {' or '.join(wanted)}")


def _check_shape(tensor: Tensor, spec: Input) -> None:
    rest = tensor.shape[1:]
    if spec.kind == "ids":
        fits, wanted = len(rest) == 1 and rest[0] <= spec.size, f"[rows, at most {spec.size}]"
    elif spec.kind == "vector":
        fits, wanted = rest == (spec.size,), f"[rows, {spec.size}]"
    else:
        fits, wanted = rest in {(), (1,)}, "[rows]"
    if not fits:
        raise invalid(tensor.name, f"shape is {list(tensor.shape)}, wanted {wanted}")


def _time_ms(tensor: Tensor | None) -> int:
    if tensor is None:
        return time.time_ns() // 1_000_000
    _check_datatype(tensor, ("INT64",))
    if tensor.shape not in {(1,), (1, 1)} or isinstance(tensor.values, Texts):
        raise invalid(TIME, f"shape is {list(tensor.shape)}, wanted [1]: one time holds for all rows")
    time_ms = int(tensor.values[0])
    if not 0 <= time_ms <= MAX_TIME_MS:
        raise invalid(TIME, f"got {time_ms}, wanted 0 to {MAX_TIME_MS} (ms since 1970 UTC)")
    return time_ms or time.time_ns() // 1_000_000


def _refused(detail: str) -> ServiceError:
    return ServiceError("invalid", detail, violations=[Violation("/inputs", detail)])
