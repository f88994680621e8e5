"""The Open Inference Protocol over gRPC: the public `inference.GRPCInferenceService`."""

import numpy as np

from service import open_inference_pb2
from service.catalogue import package_version
from service.errors import ServiceError
from service.exchange import Exchange
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
from service.open_inference_pb2 import (
    InferTensorContents,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from service.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from service.parts import Parts
from service.rpc import Calls, Context
from service.tensors import Tensor, listed_tensor, num_values, raw_tensor

OPEN_INFERENCE: str = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# Which field of `contents` holds the values of a datatype.
CONTENTS = {
    "BYTES": "bytes_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


class OpenInference(Calls, GRPCInferenceServiceServicer):
    """Health, metadata and inference."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.tensors = Tensors(parts.settings.name, parts.requests)

    async def ServerLive(self, request: ServerLiveRequest, context: Context) -> ServerLiveResponse:
        """The process lives."""

        async def make(exchange: Exchange) -> ServerLiveResponse:
            return ServerLiveResponse(live=True)

        return await self.answer(context, f"/{OPEN_INFERENCE}/ServerLive", make)

    async def ServerReady(self, request: ServerReadyRequest, context: Context) -> ServerReadyResponse:
        """Whether this worker can answer."""

        async def make(exchange: Exchange) -> ServerReadyResponse:
            return ServerReadyResponse(ready=await self._is_ready())

        return await self.answer(context, f"/{OPEN_INFERENCE}/ServerReady", make)

    async def ModelReady(self, request: ModelReadyRequest, context: Context) -> ModelReadyResponse:
        """Whether the model can be asked."""

        async def make(exchange: Exchange) -> ModelReadyResponse:
            is_ready = await self._is_ready()
            self.tensors.check_model(request.name)
            if is_ready:
                self._check_version(request.version, exchange)
            return ModelReadyResponse(ready=is_ready)

        return await self.answer(context, f"/{OPEN_INFERENCE}/ModelReady", make)

    async def ServerMetadata(self, request: ServerMetadataRequest, context: Context) -> ServerMetadataResponse:
        """What this server is."""

        async def make(exchange: Exchange) -> ServerMetadataResponse:
            return ServerMetadataResponse(name=SERVER, version=package_version(), extensions=EXTENSIONS)

        return await self.answer(context, f"/{OPEN_INFERENCE}/ServerMetadata", make)

    async def ModelMetadata(self, request: ModelMetadataRequest, context: Context) -> ModelMetadataResponse:
        """What the model takes and gives."""

        async def make(exchange: Exchange) -> ModelMetadataResponse:
            self.tensors.check_model(request.name)
            self._check_version(request.version, exchange)
            return ModelMetadataResponse(
                name=self.tensors.model,
                versions=[str(self.parts.model.stamp().version), LATEST],
                platform=SERVER,
                inputs=map(_metadata, self.tensors.input_specs),
                outputs=[_metadata(SCORE_SPEC)],
            )

        return await self.answer(context, f"/{OPEN_INFERENCE}/ModelMetadata", make)

    async def ModelInfer(self, request: ModelInferRequest, context: Context) -> ModelInferResponse:
        """Score rows."""

        async def make(exchange: Exchange) -> ModelInferResponse:
            return self._infer(request, exchange)

        reads, size = self.parts.admission.reads, request.ByteSize()
        return await self.answer(context, f"/{OPEN_INFERENCE}/ModelInfer", make, size=size, lane=reads)

    def _infer(self, request: ModelInferRequest, exchange: Exchange) -> ModelInferResponse:
        self.tensors.check_model(request.model_name)
        self._check_version(request.model_version, exchange)
        for output in request.outputs:
            check_output(output.name)
            for name in output.parameters:
                check_parameter(name)
        scores = self.parts.model.score(self.tensors.candidates(_read(request)))
        check_version(request.model_version, scores.stamp)  # it may have moved on meanwhile
        exchange.stamp = scores.stamp
        exchange.num_items = len(scores.probabilities_B)
        exchange.stage("gather", scores.gather_s)
        exchange.stage("model", scores.model_s)
        values_B = scores.probabilities_B.astype("<f4", copy=False)
        response = ModelInferResponse(
            model_name=self.tensors.model, model_version=str(scores.stamp.version), id=request.id
        )
        score = response.outputs.add(name=SCORE, datatype=SCORE_SPEC.datatype, shape=[len(values_B)])
        if request.raw_input_contents:
            response.raw_output_contents.append(values_B.tobytes())
        else:
            score.contents.CopyFrom(InferTensorContents(fp32_contents=values_B.astype(np.float64).tolist()))
        return response

    async def _is_ready(self) -> bool:
        return (await self.parts.health.report()).status != "not_ready"

    def _check_version(self, version: str, exchange: Exchange) -> None:
        exchange.stamp = self.parts.model.stamp()
        check_version(version, exchange.stamp)


def _read(request: ModelInferRequest) -> list[Tensor]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise ServiceError("invalid", f"{len(raw)} raw_input_contents for {len(request.inputs)} inputs")
    return [_tensor(tensor, raw[place] if raw else None) for place, tensor in enumerate(request.inputs)]


def _tensor(tensor: ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    for name in tensor.parameters:
        check_parameter(name)
    if raw is not None:
        return raw_tensor(tensor.name, tensor.datatype, tensor.shape, raw)
    num_values(tensor.name, tensor.datatype, tensor.shape)  # names a datatype that there is no field for
    return listed_tensor(
        tensor.name, tensor.datatype, tensor.shape, getattr(tensor.contents, CONTENTS[tensor.datatype])
    )


def _metadata(spec: TensorSpec) -> ModelMetadataResponse.TensorMetadata:
    return ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)
