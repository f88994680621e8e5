"""LitServe, used as its documentation says: one worker on the CPU, JSON in, `predict`, JSON out.

python -m tests.bench.peer_servers.litserve_server DIRECTORY PORT
"""

import sys
from pathlib import Path
from typing import Any

import litserve
from torch import Tensor

from tests.bench.peer_servers.frozen import FrozenModel


class Api(litserve.LitAPI):
    """LitServe's four verbs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(api_path="/score")
        self._directory = directory

    def setup(self, device: str) -> None:
        self._model = FrozenModel.of_dicts(self._directory)

    def decode_request(self, request: dict[str, Any]) -> Tensor:
        return self._model.encode(request["candidates"])

    def predict(self, x: Tensor) -> Any:
        return self._model.score(x)

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"scores": output.tolist()}


def main() -> None:
    """Serve."""
    server = litserve.LitServer(Api(Path(sys.argv[1])), accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="error", access_log=False,
        generate_client_file=False,
    )  # fmt: skip


if __name__ == "__main__":
    main()
