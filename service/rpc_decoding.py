"""Messages that are none: INVALID_ARGUMENT, as the caller's fault, where grpc itself would say UNKNOWN.

grpc.aio calls a method's deserializer outside any code of ours, so an error in it cannot be caught there. Here it makes
a marker of what it cannot read, and the method's wrapper refuses the call. Costs one comparison a message.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Refuse: TypeAlias = Callable[[Context], Awaitable[NoReturn]]

UNREADABLE: Any = object()


class DecodingServer:
    """What the generated `add_..._to_server` functions take for a server: it registers their methods, wrapped."""

    def __init__(self, server: grpc.aio.Server, refuse: Refuse) -> None:
        """`refuse` ends a call whose message cannot be read."""
        self._server = server
        self._refuse = refuse

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Nothing: the same methods come by `add_registered_method_handlers`, by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register the methods of one service."""
        wrapped = {name: self._wrapped(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))

    def _wrapped(self, handler: Any) -> Any:
        types = (_tolerant(handler.request_deserializer), handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary), *types)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._unary_stream(handler.unary_stream), *types)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._stream_unary(handler.stream_unary), *types)
        return grpc.stream_stream_rpc_method_handler(self._stream(handler.stream_stream), *types)

    def _unary(self, call: Any) -> Any:
        async def checked(request: Any, context: Context) -> Any:
            if request is UNREADABLE:
                await self._refuse(context)
            return await call(request, context)

        return checked

    def _unary_stream(self, call: Any) -> Any:
        async def checked(request: Any, context: Context) -> AsyncIterator[Any]:
            if request is UNREADABLE:
                await self._refuse(context)
            async for reply in call(request, context):
                yield reply

        # One that is no generator writes through its context, and is awaited as a method with one answer is.
        return checked if inspect.isasyncgenfunction(call) else self._unary(call)

    def _stream_unary(self, call: Any) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Context) -> Any:
            return await call(self._readable(requests, context), context)

        return checked

    def _stream(self, call: Any) -> Any:
        async def checked(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async for reply in call(self._readable(requests, context), context):
                yield reply

        return checked if inspect.isasyncgenfunction(call) else self._stream_unary(call)

    async def _readable(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            if request is UNREADABLE:
                await self._refuse(context)
            yield request


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(content: bytes) -> Any:
        try:
            return deserialize(content)
        except DecodeError:
            return UNREADABLE

    return read
