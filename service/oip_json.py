"""The JSON of the Open Inference Protocol: what `/v2` decodes, answers and documents."""

from typing import Annotated, Any

import msgspec

Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Parameters = dict[str, Any]
RawArray = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array"})
]  # what its items are a datatype says


class InputTensor(msgspec.Struct, gc=False):
    """One input of all rows. `data` is in row-major order, flat or nested; without it `parameters.binary_data_size`."""

    name: str
    shape: list[Dimension]
    datatype: str
    parameters: Parameters = {}
    data: RawArray | msgspec.UnsetType = msgspec.UNSET


class RequestedOutput(msgspec.Struct, gc=False):
    """An output that is wanted, in bytes if `parameters.binary_data`."""

    name: str
    parameters: Parameters = {}


class InferRequest(msgspec.Struct, gc=False):
    """Body of an inference. `parameters.binary_data_output`: outputs come as bytes unless they say otherwise."""

    inputs: list[InputTensor]
    id: str | None = None
    parameters: Parameters = {}
    outputs: list[RequestedOutput] = []


class OutputTensor(msgspec.Struct, omit_defaults=True):
    """One output: its numbers in `data`, or in so many bytes behind the JSON as `parameters.binary_data_size` says."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[float] | None = None


class InferAnswer(msgspec.Struct, omit_defaults=True):
    """Scores of the rows; `id` is the request's."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str | None = None


class TensorMetadata(msgspec.Struct):
    """One tensor; -1 is the number of rows."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """What the model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ServerMetadata(msgspec.Struct):
    """What this server is."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(msgspec.Struct):
    """The process lives."""

    live: bool


class ServerReady(msgspec.Struct):
    """This worker can answer."""

    ready: bool


class ModelReady(msgspec.Struct):
    """The model can be asked."""

    name: str
    ready: bool


class ErrorAnswer(msgspec.Struct):
    """What went wrong, in the protocol's own grammar."""

    error: str
