"""The floor of the frameworks: a FastAPI route and a gRPC method that read a request and answer nothing."""

import sys

import grpc
import uvicorn
import uvloop
from fastapi import FastAPI, Request, Response

GRPC_METHOD = "/livebed.v1.Empty/Answer"


async def serve(http_port: int, grpc_port: int) -> None:
    """Run both on one loop, as a worker of the service does."""
    app = FastAPI()

    @app.post("/empty")
    async def empty(request: Request) -> Response:
        await request.body()
        return Response(b"{}", media_type="application/json")

    async def answer(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return b""

    service, method = GRPC_METHOD[1:].split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(answer)})
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    config = uvicorn.Config(app, host="127.0.0.1", port=http_port, log_level="error", access_log=False)
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2])))
