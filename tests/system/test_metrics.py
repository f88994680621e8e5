"""What is counted with several workers is what clients sent, and every promised name is there."""

import re
from collections.abc import Iterator

import pytest

from service.client import Client
from service.keepalive import KeepAlive
from tests.system.running import Running, system

# fmt: off
PROMISED = [
    "event_to_visible_seconds", "model_age_seconds", "request_duration_seconds", "queue_wait_seconds",
    "rejected_requests_total", "embedding_lookups_total", "table_rows", "table_bytes",
    "evictions_total", "events_received_total", "events_accepted_total", "events_duplicate_total",
    "events_rejected_total", "events_applied_total", "stream_lag_entries", "dead_letter_total",
    "progressive_logloss", "progressive_auc", "calibration_ratio", "guard_held_total",
    "checkpoint_duration_seconds", "build_info",
]
# fmt: on
EVENTS = (
    b'[{"features": {"user_id": 1, "video_id": 1}, "label": 1, "event_id": "a%d"},'
    b' {"features": {"user_id": 1, "video_id": 2}, "label": 0, "event_id": "a%d"},'
    b' {"features": {"user_id": 1}, "label": 7}]'
)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with system(serving__workers=2) as started:
        yield started


def scraped(running: Running) -> dict[str, float]:
    """Every sample of the text format by its name and labels."""
    status, text = running.get("/metrics", admin=True)
    assert status == 200
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_every_promised_name_has_its_help_and_type(running: Running) -> None:
    text = running.get("/metrics", admin=True)[1].decode()
    for name in PROMISED:
        family = "livebed_" + name.removesuffix("_total") if "# TYPE livebed_" + name not in text else "livebed_" + name
        assert f"# HELP {family} " in text, name
        assert f"# TYPE {family} " in text, name
    assert 'livebed_request_duration_seconds_bucket{code="200",face="http",le="0.00025"' in text


def test_totals_of_two_workers_are_what_clients_sent(running: Running) -> None:
    before = scraped(running)
    num_connections, num_each = 12, 5
    for connection in range(num_connections):  # each new connection goes to either worker
        with KeepAlive("127.0.0.1", running.http_port) as client:
            for k in range(num_each):
                number = connection * num_each + k
                assert client.post("/v1/events", EVENTS % (number, number))[0] == 202
                assert client.post("/v1/tables/video/embeddings:lookup", b'{"ids": [1, 2, "never seen"]}')[0] == 200
                assert client.post("/v1/score", b"{")[0] == 400
        with Client(f"127.0.0.1:{running.grpc_port}") as sdk:
            sdk.score([{"user_id": 1}])
    num = num_connections * num_each
    after = scraped(running)

    def added(name: str, labels: str = "") -> float:
        pattern = re.compile(f"livebed_{name}(\\{{.*{re.escape(labels)}.*\\}})?$")
        return sum(value - before.get(key, 0.0) for key, value in after.items() if pattern.match(key))

    assert added("events_received_total") == 3 * num
    assert added("events_accepted_total") == num  # of two with one event_id the second is a duplicate
    assert added("events_duplicate_total") >= num  # the trainer counts there too
    assert added("events_rejected_total") == num
    assert added("embedding_lookups_total", 'table="video"') == 3 * num
    assert added("embedding_lookups_total", 'status="unknown"') >= num
    assert added("rejected_requests_total", 'reason="malformed"') == num
    assert added("request_duration_seconds_count", 'code="202",face="http",route="/v1/events"') == num
    assert added("request_duration_seconds_count", 'face="grpc",route="/livebed.v1.ScoringService/Score"') == 12
    assert added("queue_wait_seconds_count") == 3 * num + 12
    running.wait_until(lambda: scraped(running)["livebed_events_applied_total"] >= num, "the trainer")
    boards = {path.name for path in (running.run_dir / "metrics").iterdir()}
    assert {"service-0.board", "service-1.board"} <= boards


def test_the_age_of_the_model_is_the_oldest_workers(running: Running) -> None:
    running.learn(1)
    running.wait_until(lambda: 0 < scraped(running)["livebed_model_age_seconds"] < 60, "an age")
