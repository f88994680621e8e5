"""Logs for machines: every line of every process is one JSON object, without what requests said."""

import json
from datetime import datetime

from tests.system.running import system

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_every_process_logs_json_and_slow_requests_by_their_id() -> None:
    with system(log="json", serving__slow_request_ms=0.001) as running:
        running.learn(3)
        body = json.dumps({"rows": [{"user_id": "a secret id"}]}).encode()
        headers = {"x_request_id": "mine", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert running.request("POST", "/v1/score", body, content_type="application/json", **headers)[0] == 200
        running.wait_until(lambda: '"mine"' in running.log, "the slow request to be logged")
        assert running.stop() == 0
        said = running.log
    lines = [json.loads(line) for line in said.splitlines()]
    assert {"trainer", "service-0", "supervisor"} <= {line["process"] for line in lines}
    for line in lines:
        assert {"time", "level", "process", "logger", "message"} <= line.keys()
        assert datetime.fromisoformat(line["time"]).utcoffset() is not None
    [slow] = [line for line in lines if line.get("request_id") == "mine"]
    assert slow["message"].startswith("slow request: /v1/score 200 took ")
    assert slow["trace_id"] == TRACE
    assert "secret" not in said
