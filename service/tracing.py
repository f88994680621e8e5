"""Spans of requests, sent by OTLP over HTTP: the extra `livebed[otel]`, on when an endpoint is set and absent else.

A request's span continues the trace of its client's W3C `traceparent`. It has the route, the status and the request id,
never what was asked for. Probes have none.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from service.edge import EXCHANGE, PROBES, App, Scope, Send
from service.limits import Message, Receive
from trainer.errors import SettingsError
from trainer.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

PARENT = (b"traceparent", b"tracestate")


class Tracing:
    """Makes spans and sends them, in batches, from a thread of its own."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415 - optional

        self._provider = provider
        self._tracer = provider.get_tracer("livebed")
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    @classmethod
    def start(cls, settings: Settings, process: str) -> Self | None:
        """Tracing towards the endpoint that is set; None if none is. Raises SettingsError without the packages."""
        endpoint = settings.serving.otel_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        if not endpoint:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError:
            raise SettingsError(
                "serving.otel_endpoint", endpoint, "the extra `livebed[otel]` to be installed"
            ) from None
        named = {"service.name": "livebed", "service.namespace": settings.name, "service.instance.id": process}
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def begin(self, name: str, carrier: Mapping[str, str]) -> "Span":
        """A server's span, within its client's trace if the carrier names one."""
        from opentelemetry.trace import SpanKind  # noqa: PLC0415 - loaded already

        return self._tracer.start_span(name, context=self._propagator.extract(carrier), kind=SpanKind.SERVER)

    def traced(self, app: App) -> App:
        """The application, with a span for each request."""

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] in PROBES:
                await app(scope, receive, send)
                return
            carrier = {n.decode(): v.decode("latin-1") for n, v in scope["headers"] if n in PARENT}
            span = self.begin(scope["method"], carrier)

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                exchange = scope[EXCHANGE]
                span.update_name(f"{scope['method']} {exchange.route}")
                span.set_attribute("http.route", exchange.route)
                span.set_attribute("livebed.request_id", exchange.request_id)
                span.end()

        return call

    def close(self) -> None:
        """Send what is left; blocks."""
        self._provider.shutdown()
