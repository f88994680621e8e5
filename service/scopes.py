"""Which call needs which scope: the one table. A call that is not in it needs `admin`: a new one begins closed."""

import re
from typing import Final

SCORE, LOOKUP, INGEST, ADMIN, METRICS = "score", "lookup", "ingest", "admin", "metrics"
SCOPES: Final = frozenset({SCORE, LOOKUP, INGEST, ADMIN, METRICS})
OPEN: Final = "open"  # no token: probes, which say nothing of the model's content
ANY: Final = "any"  # any valid token

# HTTP: method and path, with {} for what varies. A path of which there is no route needs any valid token.
HTTP: Final = {
    "GET /livez": OPEN,
    "GET /readyz": OPEN,
    "GET /startupz": OPEN,
    "GET /v2/health/live": OPEN,
    "GET /v2/health/ready": OPEN,
    "GET /metrics": METRICS,
    "GET /v1/live": METRICS,
    "POST /v1/events": INGEST,
    "POST /v1/outcomes": INGEST,
    "POST /v1/score": SCORE,
    "POST /v1/rank": SCORE,
    "POST /v1/tables/{}/embeddings:lookup": LOOKUP,
    "POST /v1/tables/{}/embeddings:search": LOOKUP,
    "GET /v1/tables/{}/embeddings/{}": LOOKUP,
    "GET /v1/model": ANY,
    "GET /v1/model/versions": ANY,
    "GET /v1/tables": ANY,
    "GET /v1/info": ANY,
    "GET /v2": ANY,
    "GET /v2/models/{}": ANY,
    "GET /v2/models/{}/ready": ANY,
    "GET /v2/models/{}/versions/{}": ANY,
    "GET /v2/models/{}/versions/{}/ready": ANY,
    "POST /v2/models/{}/infer": SCORE,
    "POST /v2/models/{}/versions/{}/infer": SCORE,
    "DELETE /v1/tables/{}/embeddings/{}": ADMIN,
    "POST /v1/tables/{}:resize": ADMIN,
    "POST /v1/model/versions/{}:activate": ADMIN,
    "POST /v1/model:release": ADMIN,
    "POST /v1/checkpoints": ADMIN,
}

# gRPC: full method, or all of a service.
RPC: Final = {
    "/livebed.v1.EventService/": INGEST,
    "/livebed.v1.EmbeddingService/": LOOKUP,
    "/livebed.v1.ScoringService/": SCORE,
    "/livebed.v1.ModelService/GetModel": ANY,
    "/livebed.v1.ModelService/ListVersions": ANY,
    "/livebed.v1.ModelService/ActivateVersion": ADMIN,
    "/livebed.v1.ModelService/CreateCheckpoint": ADMIN,
    "/inference.GRPCInferenceService/ServerLive": OPEN,
    "/inference.GRPCInferenceService/ServerReady": OPEN,
    "/inference.GRPCInferenceService/ServerMetadata": ANY,
    "/inference.GRPCInferenceService/ModelReady": ANY,
    "/inference.GRPCInferenceService/ModelMetadata": ANY,
    "/inference.GRPCInferenceService/ModelInfer": SCORE,
    "/grpc.health.v1.Health/": OPEN,
    "/grpc.reflection.v1alpha.ServerReflection/": ANY,
    "/grpc.reflection.v1.ServerReflection/": ANY,
}

OPEN_PATHS: Final = frozenset(call.split(" ")[1] for call, scope in HTTP.items() if scope == OPEN)
_VARIES = re.compile(r"\{[^}]*\}")


def http_scope(method: str, template: str) -> str:
    """The scope of a route.

    >>> http_scope("GET", "/v1/tables/{table}/embeddings/{id}"), http_scope("POST", "/v1/not-in-the-table")
    ('lookup', 'admin')
    """
    return HTTP.get(f"{method} {_VARIES.sub('{}', template)}", ADMIN)


def rpc_scope(method: str) -> str:
    """The scope of a method.

    >>> rpc_scope("/livebed.v1.ScoringService/Rank"), rpc_scope("/some.Service/Call")
    ('score', 'admin')
    """
    service = method[: method.rfind("/") + 1]
    return RPC.get(method) or RPC.get(service, ADMIN)
