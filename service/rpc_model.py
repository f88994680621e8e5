"""ModelService: the operator's calls and the state of the model over gRPC, as over HTTP."""

from collections.abc import Awaitable, Callable

import numpy as np

from service import catalogue, model_service_pb2
from service.errors import ServiceError, Violation
from service.exchange import Exchange
from service.model_service_pb2 import (
    ActivateVersionRequest,
    ActivateVersionResponse,
    CreateCheckpointRequest,
    CreateCheckpointResponse,
    ForgetEmbeddingRequest,
    ForgetEmbeddingResponse,
    GetModelRequest,
    GetModelResponse,
    InspectEmbeddingRequest,
    InspectEmbeddingResponse,
    ListVersionsRequest,
    ListVersionsResponse,
    OptimizerState,
    ReleaseRequest,
    ReleaseResponse,
    ResizeTableRequest,
    ResizeTableResponse,
    Version,
)
from service.model_service_pb2_grpc import ModelServiceServicer
from service.operations import InspectAnswer, VersionInfo
from service.parts import Parts
from service.proto_wire import stamp_message
from service.rpc import Calls, Context, Reply
from service.value_pb2 import Id
from trainer.settings import is_loopback

MODELS = model_service_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name


class Models(Calls, ModelServiceServicer):
    """Reads the model's state, and changes what is served."""

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        """State of the live model."""

        async def make(exchange: Exchange) -> GetModelResponse:
            exchange.stamp = self.parts.model.stamp()
            found = catalogue.model_answer(self.parts)
            return GetModelResponse(
                name=found.name,
                family=found.family,
                model=stamp_message(exchange.stamp),
                generation=found.generation,
                step=found.step,
                schema_hash=found.schema_hash,
                publishing=found.publishing,
                trainer_alive=found.trainer.alive,
                heartbeat_age_ms=found.trainer.heartbeat_age_ms,
            )

        return await self.answer(context, f"/{MODELS}/GetModel", make)

    async def ListVersions(self, request: ListVersionsRequest, context: Context) -> ListVersionsResponse:
        """Kept checkpoints."""

        async def make(exchange: Exchange) -> ListVersionsResponse:
            found = await self.parts.operations.versions()
            versions = [_version(one) for one in found.versions]
            return ListVersionsResponse(publishing=found.publishing or "", reasons=found.reasons, versions=versions)

        return await self.answer(context, f"/{MODELS}/ListVersions", make)

    async def ActivateVersion(self, request: ActivateVersionRequest, context: Context) -> ActivateVersionResponse:
        """Roll serving back."""

        async def make(exchange: Exchange) -> ActivateVersionResponse:
            done = await self.parts.operations.activate(str(request.version))
            return ActivateVersionResponse(version=done.version, model_version=done.model_version, seconds=done.seconds)

        return await self._operate(context, "ActivateVersion", make)

    async def Release(self, request: ReleaseRequest, context: Context) -> ReleaseResponse:
        """Show again what is learned."""

        async def make(exchange: Exchange) -> ReleaseResponse:
            return ReleaseResponse(model_version=(await self.parts.operations.release()).model_version)

        return await self._operate(context, "Release", make)

    async def CreateCheckpoint(self, request: CreateCheckpointRequest, context: Context) -> CreateCheckpointResponse:
        """Write a checkpoint."""

        async def make(exchange: Exchange) -> CreateCheckpointResponse:
            saved = await self.parts.operations.create_checkpoint()
            return CreateCheckpointResponse(
                version=saved.version,
                step=saved.step,
                position=saved.position,
                seconds=saved.seconds,
                pause_seconds=saved.pause_s,
            )

        return await self._operate(context, "CreateCheckpoint", make)

    async def ResizeTable(self, request: ResizeTableRequest, context: Context) -> ResizeTableResponse:
        """Give a table another capacity."""

        async def make(exchange: Exchange) -> ResizeTableResponse:
            done = await self.parts.operations.resize(request.table, request.capacity)
            return ResizeTableResponse(stream_id=done.stream_id)

        return await self._operate(context, "ResizeTable", make)

    async def InspectEmbedding(self, request: InspectEmbeddingRequest, context: Context) -> InspectEmbeddingResponse:
        """One id of one table."""

        async def make(exchange: Exchange) -> InspectEmbeddingResponse:
            exchange.stamp = self.parts.model.stamp()
            found = await self.parts.operations.inspect(request.table, _text(request.id))
            answer = _inspected(found)
            answer.model.CopyFrom(stamp_message(exchange.stamp))
            return answer

        return await self.answer(context, f"/{MODELS}/InspectEmbedding", make)

    async def ForgetEmbedding(self, request: ForgetEmbeddingRequest, context: Context) -> ForgetEmbeddingResponse:
        """Forget one id."""

        async def make(exchange: Exchange) -> ForgetEmbeddingResponse:
            done = await self.parts.operations.forget(request.table, _text(request.id))
            return ForgetEmbeddingResponse(stream_id=done.stream_id, checkpoints=done.checkpoints)

        return await self._operate(context, "ForgetEmbedding", make)

    async def _operate(self, context: Context, method: str, make: Callable[[Exchange], Awaitable[Reply]]) -> Reply:
        async def checked(exchange: Exchange) -> Reply:
            check_operator(self.parts)
            return await make(exchange)

        return await self.answer(context, f"/{MODELS}/{method}", checked)


def check_operator(parts: Parts) -> None:
    """Raise ServiceError("permission_denied") where whoever reaches the listener could change the model.

    With tokens the scope `admin` has been demanded already (`service.rpc_access`).
    """
    if parts.access is None and not is_loopback(parts.settings.serving.host):
        detail = "this call changes the model and there are no tokens: set serving.tokens_file, or use the admin port"
        raise ServiceError("permission_denied", detail)


def _text(id_: Id) -> str:
    kind = id_.WhichOneof("kind")
    if kind is None:
        raise ServiceError("invalid", "id: got none, wanted text or integer", violations=[Violation("id", "is needed")])
    return str(getattr(id_, kind))


def _version(info: VersionInfo) -> Version:
    return Version(
        version=info.version,
        created=info.created or "",
        step=info.step or 0,
        position=info.position or "",
        model_version=info.model_version or "",
        bytes=info.bytes,
        format=info.format or 0,
        active=info.active,
        problem=info.problem or "",
    )


def _inspected(found: InspectAnswer) -> InspectEmbeddingResponse:
    optimizer = None
    if found.optimizer is not None:
        one = found.optimizer
        optimizer = OptimizerState(
            accumulator=one.accumulator, moment_norm=one.moment_norm, wide_z=one.wide_z, wide_n=one.wide_n
        )
    return InspectEmbeddingResponse(
        key=int(found.key),
        status=found.status,
        values=np.array(found.vector, "<f4").tobytes(),
        count=found.count,
        last_seen_ms=found.last_seen_ms,
        optimizer=optimizer,
        sketch_estimate=found.sketch_estimate,
        note=found.note or "",
    )
