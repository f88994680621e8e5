"""TorchServe: packs the frozen model into an archive, and becomes the server.

    python -m tests.bench.peer_servers.torchserve_server DIRECTORY PORT

Needs Java 11 or newer (17 is tried). It serves at /predictions/score.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.bench.peer_servers.frozen import VOCABULARY, WEIGHTS
from tests.stack import free_port

HERE = Path(__file__).parent


def pack(directory: Path, store: Path) -> None:
    """Write score.mar."""
    extra = ",".join(str(path) for path in (HERE / "frozen.py", directory / WEIGHTS, directory / VOCABULARY))
    archiver = Path(sys.executable).with_name("torch-model-archiver")
    command = [archiver, "--model-name=score", "--version=1.0", f"--handler={HERE / 'torchserve_handler.py'}"]
    subprocess.run([*command, f"--extra-files={extra}", f"--export-path={store}", "--force"], check=True)


def configuration(port: int) -> str:
    """One worker, no batching (each request waits for one answer), loopback, no tokens."""
    return "\n".join(
        [
            f"inference_address=http://127.0.0.1:{port}",
            f"management_address=http://127.0.0.1:{free_port()}",
            f"metrics_address=http://127.0.0.1:{free_port()}",
            f"grpc_inference_port={free_port()}",
            f"grpc_management_port={free_port()}",
            "default_workers_per_model=1",
            "disable_token_authorization=true",
            "enable_envvars_config=false",
        ]
    )


def main() -> None:
    """Pack, then run in the foreground."""
    directory, port = Path(sys.argv[1]).resolve(), int(sys.argv[2])
    store = directory / "torchserve"
    store.mkdir(exist_ok=True)
    pack(directory, store)
    (store / "config.properties").write_text(configuration(port))
    os.chdir(store)  # it writes logs where it stands
    environment = {**os.environ, "LOG_LOCATION": str(store), "METRICS_LOCATION": str(store), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    server = str(Path(sys.executable).with_name("torchserve"))
    arguments = ["--start", "--foreground", "--ncs", f"--model-store={store}", "--models=score=score.mar"]
    arguments += [f"--ts-config={store / 'config.properties'}", "--disable-token-auth"]
    os.execve(server, [server, *arguments], environment)  # noqa: S606 - its own program


if __name__ == "__main__":
    main()
