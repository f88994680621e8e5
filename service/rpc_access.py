"""The check of tokens over gRPC, for every method in one place; a stream is checked again at each of its messages."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.rpc import code_pb2

from service.access import Access
from service.errors import ServiceError
from service.exchange import UNMATCHED, Exchange
from service.meters import Meters
from service.scopes import OPEN, rpc_scope

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Abort = Callable[[Context, ServiceError, Exchange], Awaitable[NoReturn]]
Metadata: TypeAlias = Any  # pairs of name and value, as gRPC hands them over


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call pass if its `authorization` names a token with the method's scope."""

    def __init__(self, access: Access, meters: Meters, abort: Abort) -> None:
        """`abort` ends a call with an error of ours."""
        self._access = access
        self._meters = meters
        self._abort = abort

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The method's handler, or one that refuses; before anything of the request is decoded."""
        method = handler_call_details.method
        scope = rpc_scope(method)
        handler = await continuation(handler_call_details)
        if scope == OPEN:
            return handler
        authorization = _value(handler_call_details.invocation_metadata, "authorization")
        error = self.problem(authorization, scope)
        if error is None and (handler is None or not _is_stream(handler)):
            return handler
        request_id = _value(handler_call_details.invocation_metadata, "x-request-id")
        call = _Call(self, UNMATCHED if handler is None else method, scope, authorization, request_id)
        if error is not None:
            return call.refusing(handler, error)
        assert handler is not None  # noqa: S101 - said above
        return call.streaming(handler)

    def problem(self, authorization: str | None, scope: str) -> ServiceError | None:
        """Why a token does not do; None if it does."""
        try:
            raw = None if authorization is None else authorization.encode("utf-8", "replace")
            self._access.token(raw).demand(scope)
        except ServiceError as error:
            return error
        return None

    async def refuse(self, context: Context, error: ServiceError, exchange: Exchange) -> NoReturn:
        """Count a refusal and end the call."""
        code = code_pb2.Code.Name(error.kind.grpc)
        self._meters.refused(error.code)
        self._meters.request(face="grpc", route=exchange.route, code=code, duration_s=exchange.elapsed_s)
        await self._abort(context, error, exchange)


class _Call:
    """A call that is refused, or looked at again while it lasts."""

    def __init__(
        self, owner: AccessInterceptor, route: str, scope: str, authorization: str | None, request_id: str | None
    ) -> None:
        self._owner, self._route, self._scope = owner, route, scope
        self._authorization, self._request_id = authorization, request_id

    def refusing(self, handler: "Handler | None", error: ServiceError) -> Handler:
        """A handler of the same kind that only refuses."""

        async def unary(request: Any, context: Context) -> NoReturn:
            await self._refuse(context, error)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._refuse(context, error)
            yield  # this makes it a stream

        sends = handler is not None and handler.request_streaming
        answers = handler is not None and handler.response_streaming
        if answers:
            return (grpc.stream_stream_rpc_method_handler if sends else grpc.unary_stream_rpc_method_handler)(stream)
        return (grpc.stream_unary_rpc_method_handler if sends else grpc.unary_unary_rpc_method_handler)(unary)

    def streaming(self, handler: Handler) -> Handler:
        """The handler, with the token looked at again before each message that it gets or sends."""
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        behaviour: Any = handler.stream_stream or handler.unary_stream or handler.stream_unary
        if handler.response_streaming and not inspect.isasyncgenfunction(behaviour):
            return handler  # it reads and writes through its context: looked at when it begins

        async def received(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for request in requests:
                await self._again(context)
                yield request

        async def answer(request: Any, context: Context) -> Any:
            return await behaviour(received(request, context), context)

        async def replies(request: Any, context: Context) -> AsyncIterator[Any]:
            messages = received(request, context) if handler.request_streaming else request
            async for reply in behaviour(messages, context):
                await self._again(context)
                yield reply

        if not handler.response_streaming:
            return grpc.stream_unary_rpc_method_handler(answer, **coders)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(replies, **coders)
        return grpc.unary_stream_rpc_method_handler(replies, **coders)

    async def _again(self, context: Context) -> None:
        error = self._owner.problem(self._authorization, self._scope)
        if error is not None:
            await self._refuse(context, error)

    async def _refuse(self, context: Context, error: ServiceError) -> NoReturn:
        exchange = Exchange(self._request_id)
        exchange.route = self._route
        await self._owner.refuse(context, error, exchange)


def _is_stream(handler: Handler) -> bool:
    return bool(handler.request_streaming or handler.response_streaming)


def _value(metadata: Metadata, wanted: str) -> str | None:
    for name, value in metadata or ():
        if name == wanted:
            return value if isinstance(value, str) else None
    return None
