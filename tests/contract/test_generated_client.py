"""A client that nobody here wrote, generated from `/openapi.json`, calls the service."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.running import RunningWorker
from tests.contract.test_faces import CANDIDATES, CONTEXT, TIME_MS


@pytest.fixture(scope="module")
def generated(system: RunningWorker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("generated")
    document = directory / "openapi.json"
    document.write_text(json.dumps(system.http.get("/openapi.json").json()))
    (directory / "config.yaml").write_text("post_hooks: []\n")
    command = [str(Path(sys.executable).with_name("openapi-python-client")), "generate", "--path", str(document)]
    command += ["--output-path", str(directory / "livebed_generated"), "--meta", "none"]
    command += ["--config", str(directory / "config.yaml")]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    sys.path.insert(0, str(directory))
    yield importlib.import_module("livebed_generated")
    sys.path.remove(str(directory))


def call(generated: Any, system: RunningWorker, name: str, **more: Any) -> Any:
    module = importlib.import_module(f"livebed_generated.api.default.{name}")
    with generated.Client(base_url=str(system.http.base_url)) as client:
        return module.sync(client=client, **more)


def body(name: str, content: Any) -> Any:
    models: Any = importlib.import_module("livebed_generated.models")
    return getattr(models, name).from_dict(content)


def test_it_scores_and_looks_up_what_the_sdk_does(generated: Any, system: RunningWorker) -> None:
    request = body("ScoreRequest", {"context": CONTEXT, "candidates": CANDIDATES, "time_ms": TIME_MS})
    answer = call(generated, system, "post_v1_score", body=request)
    assert answer.scores == system.sdk.score(CANDIDATES, context=CONTEXT, time_ms=TIME_MS).scores.tolist()
    ids = body("LookupRequest", {"ids": ["i1", "never seen"]})
    rows = call(generated, system, "post_v1_tables_table_embeddingslookup", table="item", body=ids)
    assert rows.vectors == system.sdk.lookup("item", ["i1", "never seen"]).vectors.tolist()
    assert [str(status) for status in rows.status] == ["learned", "unknown"]


def test_it_reads_errors_and_the_state_of_the_model(generated: Any, system: RunningWorker) -> None:
    ids = body("LookupRequest", {"ids": ["i1"]})
    problem = call(generated, system, "post_v1_tables_table_embeddingslookup", table="nothing", body=ids)
    assert (problem.code, problem.status) == ("unknown_table", 404)
    assert call(generated, system, "get_v1_model").trainer.alive
    assert call(generated, system, "get_v1_tables").tables[0].name == "user"
