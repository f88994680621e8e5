"""The Open Inference Protocol over HTTP (`/v2`), its binary tensor data extension included.

A body is JSON; with `Inference-Header-Content-Length: n` its first n bytes are, and the values of those tensors that
say `binary_data_size` follow, end to end. Errors are `{"error": "..."}` (see `edge.problem_reply`).
"""

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from service import answers
from service.admission import Lane
from service.catalogue import package_version
from service.edge import EXCHANGE
from service.errors import ServiceError
from service.exchange import Exchange
from service.live_model import Scores
from service.oip import (
    EXTENSIONS,
    LATEST,
    SCORE,
    SCORE_SPEC,
    SERVER,
    Tensors,
    TensorSpec,
    check_output,
    check_parameter,
    check_version,
)
from service.oip_json import (
    InferAnswer,
    InferRequest,
    InputTensor,
    ModelMetadata,
    ModelReady,
    OutputTensor,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorMetadata,
)
from service.parts import Parts
from service.tensors import BYTES, Tensor, invalid, listed_tensor, num_values, raw_tensor
from service.wire import list_of
from trainer.event_json import Integer, Number

Body = Callable[[Request, frozenset[bytes], Lane | None], Awaitable[bytes]]

# Clients that send bytes call them so, and some that send JSON do too: what a body is its headers' length says.
INFER_TYPES = frozenset({b"application/json", b"application/octet-stream"})
HEADER_LENGTH = "inference-header-content-length"
BINARY_SIZE = "binary_data_size"
JSON_VALUES: dict[str, Any] = {BYTES: str, "INT32": Integer, "INT64": Integer, "FP32": Number, "FP64": Number}


class OpenInferenceFace:
    """The handlers. `body` reads a request's body under the limits, in its turn."""

    def __init__(self, parts: Parts, body: Body) -> None:
        self.parts = parts
        self.tensors = Tensors(parts.settings.name, parts.requests)
        self._body = body
        self._request = msgspec.json.Decoder(InferRequest)
        self._flat = {datatype: msgspec.json.Decoder(list_of(kind)) for datatype, kind in JSON_VALUES.items()}
        self._nested = {
            datatype: msgspec.json.Decoder(list_of(list_of(kind))) for datatype, kind in JSON_VALUES.items()
        }

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        """Path, method and handler of every call."""
        calls: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("/v2", "GET", self.server),
            ("/v2/health/live", "GET", self.live),
            ("/v2/health/ready", "GET", self.ready),
        ]
        for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
            calls += [
                (model, "GET", self.model),
                (f"{model}/ready", "GET", self.model_ready),
                (f"{model}/infer", "POST", self.infer),
            ]
        return calls

    async def server(self, request: Request) -> Response:
        """What this server is."""
        return _encoded(ServerMetadata(SERVER, package_version(), list(EXTENSIONS)))

    async def live(self, request: Request) -> Response:
        """The process lives."""
        return _encoded(ServerLive(True))

    async def ready(self, request: Request) -> Response:
        """This worker can answer."""
        await self._check_ready()
        return _encoded(ServerReady(True))

    async def model(self, request: Request) -> Response:
        """What the model takes and gives."""
        self._check_path(request)
        version = str(self.parts.model.stamp().version)
        inputs = [_metadata(spec) for spec in self.tensors.input_specs]
        name = self.tensors.model
        return _encoded(ModelMetadata(name, [version, LATEST], SERVER, inputs, [_metadata(SCORE_SPEC)]))

    async def model_ready(self, request: Request) -> Response:
        """The model can be asked."""
        await self._check_ready()
        self._check_path(request)
        return _encoded(ModelReady(self.tensors.model, True))

    async def infer(self, request: Request) -> Response:
        """Score rows."""
        body = await self._body(request, INFER_TYPES, self.parts.admission.reads)
        self._check_path(request)
        asked, rest = self._decoded(body, request.headers.get(HEADER_LENGTH))
        tensors = self._read(asked, rest)
        for output in asked.outputs:
            check_output(output.name)
            for name in output.parameters:
                check_parameter(name)
        scores = self.parts.model.score(self.tensors.candidates(tensors))
        check_version(request.path_params.get("version", ""), scores.stamp)  # it may have moved on meanwhile
        _answered(request, scores)
        return self._answer(asked, scores)

    def _check_path(self, request: Request) -> None:
        self.tensors.check_model(request.path_params["model"])
        stamp = self.parts.model.stamp()
        check_version(request.path_params.get("version", ""), stamp)
        _exchange(request).stamp = stamp

    async def _check_ready(self) -> None:
        report = await self.parts.health.report()
        if report.status == "not_ready":
            raise ServiceError("not_ready", next(check.detail for check in report.checks if check.needed))

    def _decoded(self, body: bytes, header_length: str | None) -> tuple[InferRequest, memoryview]:
        """The JSON of a body, and the bytes behind it."""
        at = len(body)
        if header_length is not None:
            if not (header_length.isascii() and header_length.isdigit()) or int(header_length[:20]) > at:
                got = header_length[:20]
                raise ServiceError("malformed", f"Inference-Header-Content-Length is {got!r} of a body of {at} bytes")
            at = int(header_length)
        try:
            return self._request.decode(memoryview(body)[:at]), memoryview(body)[at:]
        except msgspec.ValidationError as error:
            raise ServiceError("invalid", str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ServiceError("malformed", f"the body is not valid JSON: {error}") from None

    def _read(self, asked: InferRequest, rest: memoryview) -> list[Tensor]:
        """All tensors; their bytes lie in `rest` in the order of the tensors, and nothing else does."""
        tensors = []
        for tensor in asked.inputs:
            for name in tensor.parameters:
                check_parameter(name)
            size = tensor.parameters.get(BINARY_SIZE)
            if size is None:
                tensors.append(self._listed(tensor))
                continue
            if type(size) is not int or not 0 <= size <= len(rest) or tensor.data is not msgspec.UNSET:
                wanted = f"0 to {len(rest)} (the bytes there are), and no `data` beside it"
                raise invalid(tensor.name, f"{BINARY_SIZE} is {str(size)[:20]}, wanted {wanted}")
            tensors.append(raw_tensor(tensor.name, tensor.datatype, tensor.shape, rest[:size]))
            rest = rest[size:]
        if len(rest):
            raise ServiceError("malformed", f"{len(rest)} bytes at the body's end belong to no tensor")
        return tensors

    def _listed(self, tensor: InputTensor) -> Tensor:
        num_values(tensor.name, tensor.datatype, tensor.shape)  # names a datatype that there is no decoder for
        text = b"[]" if tensor.data is msgspec.UNSET else bytes(tensor.data)
        is_nested = text[1:].lstrip()[:1] == b"["
        try:
            if is_nested:
                rows = self._nested[tensor.datatype].decode(text)
                if len(tensor.shape) != 2 or any(len(row) != tensor.shape[1] for row in rows):
                    raise invalid(tensor.name, f"`data` is nested in another way than shape {tensor.shape} says")
                values = [value for row in rows for value in row]
            else:
                values = self._flat[tensor.datatype].decode(text)
        except msgspec.DecodeError as error:
            raise invalid(tensor.name, str(error)) from None
        if tensor.datatype == BYTES:
            values = [value.encode("utf-8", "surrogatepass") for value in values]
        return listed_tensor(tensor.name, tensor.datatype, tensor.shape, values)

    def _answer(self, asked: InferRequest, scores: Scores) -> Response:
        values_B = scores.probabilities_B.astype("<f4", copy=False)
        as_bytes = asked.parameters.get("binary_data_output") is True
        if asked.outputs:
            as_bytes = asked.outputs[0].parameters.get("binary_data", as_bytes) is True
        output = OutputTensor(SCORE, SCORE_SPEC.datatype, [len(values_B)])
        if as_bytes:
            output.parameters = {BINARY_SIZE: values_B.nbytes}
        else:
            output.data = values_B.astype(np.float64).tolist()
        version = str(scores.stamp.version)
        head = msgspec.json.encode(InferAnswer(self.tensors.model, version, [output], asked.id))
        if not as_bytes:
            return Response(head, media_type=answers.JSON_TYPE)
        headers = {HEADER_LENGTH: str(len(head))}
        return Response(head + values_B.tobytes(), media_type=answers.BINARY_TYPE, headers=headers)


def _metadata(spec: TensorSpec) -> TensorMetadata:
    return TensorMetadata(spec.name, spec.datatype, list(spec.shape))


def _exchange(request: Request) -> Exchange:
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


def _answered(request: Request, scores: Scores) -> None:
    exchange = _exchange(request)
    exchange.stamp = scores.stamp
    exchange.num_items = len(scores.probabilities_B)
    exchange.check_deadline()
    exchange.stage("gather", scores.gather_s)
    exchange.stage("model", scores.model_s)


def _encoded(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=answers.JSON_TYPE)
