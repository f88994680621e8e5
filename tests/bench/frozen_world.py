"""The one model and the one set of requests that Livebed and its peers are compared on.

Eight categorical features made of the KuaiRand log, the default net, trained by our trainer on the whole log; taken out
of the live store into plain arrays for the peers (`peer_servers/frozen.py`).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.feed import ENTRY_EVENTS, write_entries
from tests.bench.kuairand import MS_PER_HOUR, raw_rows
from tests.bench.peer_servers.frozen import VOCABULARY, WEIGHTS
from trainer.codec import encode
from trainer.dense import DenseLayout
from trainer.event_json import EventParser
from trainer.hashing import hash_values
from trainer.live import LEARNED, Reader
from trainer.publish import row_section
from trainer.schema import Schema
from trainer.settings import Settings

FEATURES = ("user_id", "video_id", "previous_id", "hour", "weekday", "duration", "seconds", "quarter")
WIDTH = 16
NUM_BODIES = 64  # different requests, sent in turn
ITEM_FEATURES = ("video_id", "duration", "seconds")

Row = dict[str, int]


def configuration() -> dict[str, Any]:
    """Every feature has a table, but that the video seen before is a video too."""
    capacity = {"user_id": 50_000, "video_id": 200_000}
    names = [name for name in FEATURES if name != "previous_id"]
    tables = {name: {"width": WIDTH, "capacity": capacity.get(name, 4096)} for name in names}
    features = {name: {"kind": "categorical", "table": name} for name in names}
    features["previous_id"] = {"kind": "categorical", "table": "video_id"}
    return {"name": "peers", "tables": tables, "features": {name: features[name] for name in FEATURES}}


def log_rows() -> tuple[list[Row], list[int]]:
    """All impressions as rows of the eight features, in time order, and whether each was clicked."""
    rows: list[Row] = []
    previous: dict[int, int] = {}
    labels = []
    for raw in raw_rows():
        hours = raw["time_ms"] // MS_PER_HOUR
        row = {
            "user_id": raw["user_id"],
            "video_id": raw["video_id"],
            "previous_id": previous.get(raw["user_id"], 0),
            "hour": hours % 24,
            "weekday": (hours // 24 + 3) % 7,
            "duration": round(float(np.log2(max(raw["duration_ms"], 1)))),
            "seconds": raw["duration_ms"] // 1000,
            "quarter": raw["time_ms"] // (MS_PER_HOUR // 4) % 96,
        }
        previous[raw["user_id"]] = raw["video_id"]
        rows.append(row)
        labels.append(raw["is_click"])
    return rows, labels


def event_bodies(rows: Sequence[Row], labels: Sequence[int], *, size: int) -> Iterator[bytes]:
    """The log as bodies of `/v1/events`."""
    for at in range(0, len(rows), size):
        pairs = zip(rows[at : at + size], labels[at : at + size], strict=True)
        yield json.dumps([{"features": row, "label": label} for row, label in pairs]).encode()


def write_log(settings: Settings, rows: Sequence[Row], labels: Sequence[int], path: Path) -> int:
    """The log as ready-made entries for the feeder; returns how many events they hold."""
    schema = Schema.from_settings(settings)
    parser = EventParser(schema)
    bodies = list(event_bodies(rows, labels, size=ENTRY_EVENTS))
    if len(rows) % ENTRY_EVENTS:
        bodies.pop()  # all entries of one size, so that entries/s say events/s
    write_entries(path, [encode(schema, parser.parse(body, accepted_us=1)[0]) for body in bodies])
    return ENTRY_EVENTS * len(bodies)


def score_bodies(rows: Sequence[Row], num_candidates: int) -> list[bytes]:
    """Requests: one user's moment, and that many videos to choose from."""
    random = np.random.default_rng(num_candidates)
    bodies = []
    for _ in range(NUM_BODIES):
        moment = rows[int(random.integers(len(rows)))]
        chosen = [rows[k] for k in random.integers(len(rows), size=num_candidates).tolist()]
        candidates = [{**moment, **{name: video[name] for name in ITEM_FEATURES}} for video in chosen]
        bodies.append(json.dumps({"candidates": candidates}, separators=(",", ":")).encode())
    return bodies


def export(settings: Settings, rows: Sequence[Row], directory: Path) -> None:
    """Write what the live store holds of all values in `rows`, and the net, as `peer_servers/frozen.py` reads them."""
    schema = Schema.from_settings(settings)
    reader = Reader(settings.store_path)
    reader.attach(0)
    features = [feature.name for feature in schema.id_features]  # in the order in which their rows lie in x
    table_F = schema.feature_table_F.tolist()
    arena = [np.zeros((1, WIDTH), np.float32)]
    places: dict[str, dict[int, int]] = {}
    num_rows = 1
    for table in schema.tables:
        names = [name for name, of in zip(features, table_F, strict=True) if of == table.index]
        values = sorted({row[name] for row in rows for name in names})
        words_NW, status_N = reader.gather(row_section(table), hash_values(values))
        known_N = status_N == LEARNED
        arena.append(words_NW[known_N, :WIDTH].view(np.float32))
        known = [value for value, is_known in zip(values, known_N.tolist(), strict=True) if is_known]
        row_of = dict(zip(known, range(num_rows, num_rows + len(known)), strict=True))
        places |= dict.fromkeys(names, row_of)
        num_rows += len(known)
    dense, _ = reader.dense()
    weights = DenseLayout(schema, settings.model).view(dense[:-1])
    np.savez(directory / WEIGHTS, arena=np.concatenate(arena), offset=dense[-1:], **weights)
    (directory / VOCABULARY).write_text(json.dumps({"features": features, "rows": places}))
