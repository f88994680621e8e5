"""Spans of gRPC calls with one answer; streams have none, as one may last for days."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from service.tracing import Tracing

OURS = "/livebed."  # health and reflection are not traced


class TracedCalls(grpc.aio.ServerInterceptor):
    """Wraps the methods of our services."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, with a span around it."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or handler.unary_unary is None or not method.startswith(OURS):
            return handler

        async def call(request: Any, context: Any) -> Any:
            carrier = {name: value for name, value in context.invocation_metadata() if isinstance(value, str)}
            span = self._tracing.begin(method.removeprefix("/"), carrier)
            span.set_attribute("rpc.system", "grpc")
            try:
                return await handler.unary_unary(request, context)
            finally:
                code = context.code()
                span.set_attribute("rpc.grpc.status_code", code.value[0] if isinstance(code, grpc.StatusCode) else code)
                span.end()

        return grpc.unary_unary_rpc_method_handler(
            call, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
        )
