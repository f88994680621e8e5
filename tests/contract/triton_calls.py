"""Calls a server with NVIDIA's tritonclient, in a process of its own: its stubs and ours describe one protobuf package.

    python -m tests.contract.triton_calls HTTP_ADDRESS GRPC_ADDRESS MODEL < calls.json

A call is `{"over": "http" | "http-json" | "grpc", "tensors": [[name, datatype, values], ...], ...}`; printed is a JSON
list of what each came to: `{"scores": [...], ...}` or `{"error": sentence, "status": status}`.
"""

import asyncio
import json
import sys
import types
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
from tritonclient.utils import InferenceServerException

# tritonclient.http imports geventhttpclient for its blocking client. That needs zope.interface, whose licence is none
# of those we allow; the asyncio client beside it speaks through aiohttp and shares all that makes and reads messages.
for name in ("gevent", "gevent.pool", "geventhttpclient", "geventhttpclient.url"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["geventhttpclient"].HTTPClient = sys.modules["geventhttpclient.url"].URL = None  # type: ignore[attr-defined]
import tritonclient.http.aio as over_http  # noqa: E402

NUMPY = {"BYTES": np.object_, "INT64": np.int64, "INT32": np.int32, "FP32": np.float32, "FP64": np.float64}


def inputs_of(protocol: Any, call: dict[str, Any]) -> list[Any]:
    inputs = []
    for name, datatype, values in call["tensors"]:
        array = np.array(values, NUMPY[datatype])
        tensor = protocol.InferInput(name, list(array.shape), datatype)
        if protocol is over_grpc:
            tensor.set_data_from_numpy(array)
        else:
            tensor.set_data_from_numpy(array, binary_data=call["over"] == "http")
        inputs.append(tensor)
    return inputs


def outputs_of(protocol: Any, call: dict[str, Any]) -> Any:
    if protocol is over_http and call["over"] == "http-json":
        return [protocol.InferRequestedOutput("score", binary_data=False)]
    return [protocol.InferRequestedOutput(name) for name in call["outputs"]] if "outputs" in call else None


async def http(client: Any, call: dict[str, Any], model: str) -> dict[str, Any]:
    if "ask" in call:
        return {"said": await getattr(client, call["ask"])(*call["arguments"])}
    result = await client.infer(
        call.get("model", model),
        inputs_of(over_http, call),
        model_version=call.get("version", ""),
        outputs=outputs_of(over_http, call),
        request_id=call.get("id", ""),
    )
    answer = result.get_response()
    is_binary = "binary_data_size" in answer["outputs"][0].get("parameters", {})
    return {"scores": result.as_numpy("score").tolist(), "id": answer.get("id"), "is_binary": is_binary}


def grpc(client: Any, call: dict[str, Any], model: str) -> dict[str, Any]:
    if "ask" in call:
        said = getattr(client, call["ask"])(*call["arguments"], **call.get("options", {}))
        return {"said": said}
    result = client.infer(
        call.get("model", model),
        inputs_of(over_grpc, call),
        model_version=call.get("version", ""),
        outputs=outputs_of(over_grpc, call),
        request_id=call.get("id", ""),
    )
    answer = result.get_response()
    is_binary = len(answer.raw_output_contents) == 1
    return {"scores": result.as_numpy("score").tolist(), "id": answer.id, "is_binary": is_binary}


async def main(http_address: str, grpc_address: str, model: str) -> None:
    outcomes: list[dict[str, Any]] = []
    grpc_client = over_grpc.InferenceServerClient(grpc_address)
    async with over_http.InferenceServerClient(http_address) as http_client:
        for call in json.load(sys.stdin):
            try:
                is_grpc = call["over"] == "grpc"
                outcomes.append(grpc(grpc_client, call, model) if is_grpc else await http(http_client, call, model))
            except InferenceServerException as error:
                outcomes.append({"error": error.message(), "status": error.status()})
    grpc_client.close()
    sys.stdout.write(json.dumps(outcomes))


asyncio.run(main(*sys.argv[1:]))
