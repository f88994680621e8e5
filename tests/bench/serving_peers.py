"""Livebed and the servers that others trust, with one model behind all: what `tests.bench.serving --peers` runs.

The same trained DCN-V2, the same rows, the same requests, one load generator (`load.py`), two cores shared by generator
and server, one server at a time. The peers serve it frozen; Livebed goes on learning at half of what its trainer can
take. Closed loops on one and on eight connections, and an open loop at half of the closed one's throughput.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.bench import frozen_world as world
from tests.bench.feed import feeding, read_entries
from tests.bench.harness import goal
from tests.bench.load import WARM_UP_S, Load, percentiles_ms
from tests.bench.peer_servers.running import PEERS, ask, serving
from tests.stack import Stack
from tests.system.running import descendants
from trainer.stream import EventLog

SIZES = (1, 100, 1000)  # candidates of a request
MANY = 8  # connections of the second closed loop
OPEN_CONNECTIONS = 32
NUM_COMPARED = 20  # requests whose scores must agree
TOLERANCE = 1e-5
CAPACITY_EVENTS = 120_000  # handed to the trainer at once, to see how fast it learns
AFTER_S = 0.25  # what still counts as "during" a call that an operator made


class Bodies:
    """The requests of every size, as values and as files for the generator."""

    def __init__(self, rows: list[world.Row], directory: Path) -> None:
        self.of = {size: world.score_bodies(rows, size) for size in SIZES}
        self.files = {size: directory / f"bodies-{size}" for size in SIZES}
        for size, path in self.files.items():
            path.write_bytes(b"\n".join(self.of[size]))

    def load(self, port: int, path: str, size: int, **more: Any) -> Load:
        """A run of the generator with requests of that size."""
        return Load(port, path, self.files[size], **more)


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time that these processes have taken."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def answering(stack: Stack) -> set[int]:
    """Livebed's workers: what the trainer and the broker take is the price of learning, not of an answer."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in descendants(stack.pid)}
    return {pid for pid, command in commands.items() if b"service\0--worker" in command}


def measure(
    bodies: Bodies, port: int, path: str, size: int, *, seconds: float, pids: Collection[int]
) -> dict[str, Any]:
    """Both closed loops and the open one; and the processor's time for a request, which neighbours disturb least."""
    one = bodies.load(port, path, size, seconds=seconds).summary()
    before = cpu_s(pids)
    many = bodies.load(port, path, size, seconds=seconds, connections=MANY).summary()
    many["cpu_us"] = round(1e6 * (cpu_s(pids) - before) / (many["requests_per_s"] * (seconds + WARM_UP_S)))
    throughput = max(one["requests_per_s"], many["requests_per_s"])
    rate = max(1.0, throughput / 2)
    steady = bodies.load(port, path, size, seconds=seconds, connections=OPEN_CONNECTIONS, rate=rate).summary()
    return {"closed_1": one, f"closed_{MANY}": many, "open": {**steady, "rate": rate}, "requests_per_s": throughput}


def train(stack: Stack, rows: list[world.Row], labels: list[int]) -> None:
    """The whole log, learned."""
    for body in world.event_bodies(rows, labels, size=500):
        status, answer = stack.request("POST", "/v1/events", body, content_type="application/json")
        if status != 202:
            raise RuntimeError(f"events were answered with {status}: {answer}")
    stack.wait_until(lambda: step(stack) >= len(rows), "the log is learned", 60.0)


def step(stack: Stack) -> int:
    """Events learned."""
    return int(stack.get("/v1/model")[1]["step"])


def capacity(stack: Stack, url: str, file: Path) -> float:
    """Events/s that the trainer learns when its log is full; nothing else runs."""
    entries = list(read_entries(file))
    rounds = -(-CAPACITY_EVENTS // (len(entries) * world.ENTRY_EVENTS))
    before = step(stack)
    begun = time.perf_counter()
    with EventLog(url, stack.settings.stream.key) as log:
        for _ in range(rounds):
            log.append([{"proto": entry} for entry in entries])
    wanted = before + rounds * len(entries) * world.ENTRY_EVENTS
    stack.wait_until(lambda: step(stack) >= wanted, "what it can take is learned", 60.0)
    return (wanted - before) / (time.perf_counter() - begun)


def livebed(stack: Stack, bodies: Bodies, file: Path, seconds: float) -> dict[str, Any]:
    """Everything that is asked of Livebed, with training on at half load."""
    url = f"unix://{stack.settings.run_path / 'valkey.sock'}"
    pids = answering(stack)
    quiet = measure(bodies, stack.http_port, "/v1/score", 100, seconds=seconds, pids=pids)
    most = capacity(stack, url, file)
    with feeding(url, stack.settings.stream.key, file, most / 2):
        time.sleep(1.0)
        before, begun = step(stack), time.perf_counter()
        sizes = {
            str(size): measure(bodies, stack.http_port, "/v1/score", size, seconds=seconds, pids=pids) for size in SIZES
        }
        learned_per_s = (step(stack) - before) / (time.perf_counter() - begun)
        operators = operations(stack, bodies, sizes["100"]["requests_per_s"] / 2, seconds)
    return {
        "training": {"capacity_per_s": most, "fed_per_s": most / 2, "learned_per_s": learned_per_s},
        "sizes": sizes,
        "quiet": quiet,
        "operations": operators,
    }


def operations(stack: Stack, bodies: Bodies, rate: float, seconds: float) -> dict[str, Any]:
    """Latencies of 100 candidates at half load while an operator resizes, saves and rolls back, over and over."""
    capacities = iter([300_000, 200_000] * 1000)
    calls: dict[str, Callable[[], None]] = {
        "quiet": lambda: time.sleep(0.2),
        "resize": lambda: resize(stack, "video_id", next(capacities)),
        "checkpoint": lambda: admin(stack, "/v1/checkpoints"),
        "rollback": lambda: roll_back(stack),
    }
    found = {}
    for name, call in calls.items():
        windows: list[tuple[float, float]] = []
        load = bodies.load(
            stack.http_port, "/v1/score", 100, seconds=2 * seconds, connections=OPEN_CONNECTIONS, rate=rate
        )
        with repeating(call, windows):
            summary, samples = load.finish()
        during = [took for due, took in samples if any(begun <= due <= ended + AFTER_S for begun, ended in windows)]
        calls_s = [ended - begun for begun, ended in windows]
        found[name] = {
            "ms": percentiles_ms(during), "requests": len(during), "errors": summary["errors"],
            "calls": len(windows), "call_s": round(float(np.median(calls_s)), 3) if calls_s else None,
        }  # fmt: skip
    return found


@contextmanager
def repeating(call: Callable[[], None], windows: list[tuple[float, float]]) -> Iterator[None]:
    """The call again and again meanwhile; notes when each began and ended. Raises what it raised."""
    stop, errors = threading.Event(), list[Exception]()

    def repeat() -> None:
        try:
            while not stop.wait(AFTER_S):
                begun = time.perf_counter()
                call()
                windows.append((begun, time.perf_counter()))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]


def admin(stack: Stack, path: str, body: bytes | None = None) -> Any:
    """One call of the admin port."""
    status, answer = stack.request("POST", path, body, admin=True, content_type="application/json")
    if status != 202:
        raise RuntimeError(f"{path} was answered with {status}: {answer}")
    return answer


def resize(stack: Stack, table: str, slots: int) -> None:
    """Returns when the readers have the table of the new size."""
    admin(stack, f"/v1/tables/{table}:resize", b'{"capacity":%d}' % slots)

    def done() -> bool:
        tables = stack.get("/v1/tables")[1]["tables"]
        return any(one["name"] == table and abs(one["capacity"] - slots) < slots // 10 for one in tables)

    stack.wait_until(done, "the table is resized", 30.0)


def roll_back(stack: Stack) -> None:
    """Serve the newest kept checkpoint, then what is learned again."""
    newest = stack.get("/v1/model/versions")[1]["versions"][0]["version"]
    admin(stack, f"/v1/model/versions/{newest}:activate")
    admin(stack, "/v1/model:release")


def run(seconds: float) -> dict[str, Any]:
    """All servers, one after the other."""
    rows, labels = world.log_rows()
    results: dict[str, Any] = {"load_average": os.getloadavg()[0], "skipped": {}, "peers": {}}
    with tempfile.TemporaryDirectory(prefix="livebed-") as name:
        directory = Path(name)
        configuration, entries = directory / "livebed.yaml", directory / "entries"
        configuration.write_text(yaml.safe_dump(world.configuration()))
        bodies = Bodies(rows, directory)
        compared = bodies.of[100][:NUM_COMPARED]
        results["body_bytes"] = {str(size): len(bodies.of[size][0]) for size in SIZES}
        with Stack(directory, configuration=configuration) as stack:
            train(stack, rows, labels)
            world.export(stack.settings, rows, directory)
            world.write_log(stack.settings, rows, labels, entries)
            ours = [ask(stack.http_port, "/v1/score", body) for body in compared]
            results["livebed"] = livebed(stack, bodies, entries, seconds)
        for peer in PEERS:
            if (missing := peer.missing()) is not None:
                results["skipped"][peer.name] = missing
                continue
            with serving(peer, directory, bodies.of[1][0]) as (port, pid):
                theirs = [ask(port, peer.path, body) for body in compared]
                far = float(np.abs(np.array(theirs) - np.array(ours)).max())
                if far > TOLERANCE:
                    raise RuntimeError(f"{peer.name} scores otherwise: {far:g} apart, at most {TOLERANCE:g}")
                pids = {pid} | descendants(pid)
                sizes = {
                    str(size): measure(bodies, port, peer.path, size, seconds=seconds, pids=pids) for size in SIZES
                }
                results["peers"][peer.name] = {"sizes": sizes, "farthest_score": far}
    return results


def goals(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What issue C asks for."""
    ours, found = results["livebed"]["sizes"]["100"], results["livebed"]["operations"]
    latencies = ours["closed_1"]["ms"]
    asked = [
        goal("score 100 x 8, training at half load, p50", latencies["p50"], "ms", at_most=1.5),
        goal("score 100 x 8, training at half load, p99", latencies["p99"], "ms", at_most=4.0),
    ]
    for name, least in (("handwritten", 1.3), ("litserve", 5.0), ("torchserve", 5.0)):
        if name in results["peers"]:
            theirs = results["peers"][name]["sizes"]["100"]["requests_per_s"]
            asked.append(goal(f"requests/s over {name}'s", ours["requests_per_s"] / theirs, "x", at_least=least))
    for name in ("resize", "checkpoint", "rollback"):
        ratio = found[name]["ms"].get("p99", float("inf")) / found["quiet"]["ms"]["p99"]
        asked.append(goal(f"p99 during a {name} over quiet", ratio, "x", at_most=2.0))
    return asked
