"""The gRPC server of a worker: what it serves, how it listens, what it says of its health."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from service.embedding_service_pb2_grpc import add_EmbeddingServiceServicer_to_server
from service.event_service_pb2_grpc import add_EventServiceServicer_to_server
from service.health import Report
from service.http_server import HANDSHAKE_S, max_connections
from service.limits import MAX_IN_FLIGHT
from service.model_service_pb2_grpc import add_ModelServiceServicer_to_server
from service.oip_rpc import OPEN_INFERENCE, OpenInference
from service.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from service.parts import Parts
from service.rpc import EMBEDDINGS, EVENTS, SCORING, Calls, Events, Scoring, abort
from service.rpc_access import AccessInterceptor
from service.rpc_decoding import DecodingServer
from service.rpc_model import MODELS, Models
from service.rpc_streams import EmbeddingStreams
from service.rpc_tls import server_credentials
from service.scoring_service_pb2_grpc import add_ScoringServiceServicer_to_server
from service.tls import Certificates

MIN_PING_INTERVAL_MS = 10_000  # clients that ping more often are told to go away


class RpcServer:
    """The gRPC server of one worker. Several workers listen on one port (SO_REUSEPORT), the kernel shares it out."""

    def __init__(
        self,
        parts: Parts,
        certificates: Certificates | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self._health = health_aio.HealthServicer()
        self._certificates = certificates
        access = parts.access
        self._server = grpc.aio.server(
            interceptors=[*interceptors, *([] if access is None else [AccessInterceptor(access, parts.meters, abort)])],
            maximum_concurrent_rpcs=MAX_IN_FLIGHT,
            options=[
                ("grpc.max_receive_message_length", int(parts.limits.body_bytes)),
                ("grpc.max_send_message_length", -1),  # what limits allow to ask for may also be answered
                ("grpc.so_reuseport", 1),
                ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
                ("grpc.max_allowed_incoming_connections", max_connections()),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        decoding: Any = DecodingServer(self._server, Calls(parts).refuse_message)
        add_EventServiceServicer_to_server(Events(parts), decoding)
        add_EmbeddingServiceServicer_to_server(EmbeddingStreams(parts), decoding)
        add_ScoringServiceServicer_to_server(Scoring(parts), decoding)
        add_ModelServiceServicer_to_server(Models(parts), decoding)
        add_GRPCInferenceServiceServicer_to_server(OpenInference(parts), decoding)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (EVENTS, EMBEDDINGS, SCORING, MODELS, OPEN_INFERENCE)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        reflection.enable_server_reflection((*names, health, reflection.SERVICE_NAME), self._server)

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (0 takes any)."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._certificates is None:
            bound: int = self._server.add_insecure_port(address)
        else:
            bound = self._server.add_secure_port(address, server_credentials(self._certificates))
        await self._server.start()
        return bound

    async def show(self, report: Report) -> None:
        """Let grpc.health.v1.Health follow what `/readyz` says; the event service needs the log alone."""
        reads = report.status != "not_ready"
        reading = [(name, reads) for name in ("", EMBEDDINGS, SCORING, MODELS, OPEN_INFERENCE)]
        for name, serving in (*reading, (EVENTS, report.ok("log"))):
            status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Say that no more is served, take no new calls, and let those under way finish within `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
