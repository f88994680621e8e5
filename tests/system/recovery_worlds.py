"""A log with everything in it that must survive a kill, a configuration that uses every part, and points to die at."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.system.kill_points import EFFECTS, Kill
from tests.unit.worlds import EVERY_KIND
from trainer.commands import Forget, Resize, encode
from trainer.hashing import hash_values

FIRST_MS = 1_700_000_000_000
# Small tables, so that eviction, admission, expiry and pressure all happen; a wide part and pairs.
SETTINGS: dict[str, Any] = {
    **EVERY_KIND,
    "name": "recovery",
    "deterministic": True,
    "tables": {
        "user": {"width": 8, "capacity": 200, "admission": {"kind": "count", "min_count": 2}, "eviction": "lfu"},
        "item": {"width": 4, "capacity": 150, "ttl_s": 40, "optimizer": {"decay": 0.5, "decay_every": 300}},
        "hour": {"width": 4, "capacity": 64, "admission": {"kind": "probability", "probability": 0.5}},
    },
    "model": {"wide": True, "pairs": [["user_id", "item_id"]], "pair_bits": 10, "hidden": [16, 8]},
    "stream": {"max_batch": 32, "dedup_window": 200},
}
# Calls that a whole run makes at least so often; the n-th call to die at is drawn below it.
RARE = {"dead_letter": 4, "forget": 1, "resize": 1, "remove_rows": 8, "activate": 1, "trim": 3, "fork": 3}
RARE |= {"sync_file": 8, "write_manifest": 3, "sync_directory": 4, "rename_save": 2, "point_to_save": 3}
RARE |= {"discard_save": 1}


def entries(num_entries: int = 120, seed: int = 3) -> list[tuple[str, dict[str, str]]]:
    """Entries of 1 to 40 events with ids, duplicates, feature events, poison and commands; times as in their ids."""
    random = np.random.default_rng(seed)
    return [(f"{FIRST_MS + 700 * place}-0", fields) for place, fields in enumerate(_fields(random, num_entries))]


def _fields(random: np.random.Generator, num_entries: int) -> Iterator[dict[str, str]]:
    for place in range(num_entries):
        if place % 29 == 17:
            yield {"json": "{" if place % 2 else '{"label": 7, "features": {}}'}
        elif place == num_entries // 3:
            yield {"command": encode(Forget("user", int(hash_values([3])[0]))).decode()}
        elif place == num_entries // 2:
            yield {"command": encode(Resize("item", 300)).decode()}
        else:
            yield {"json": json.dumps([_event(random, place) for _ in range(int(random.integers(1, 41)))])}


def _event(random: np.random.Generator, place: int) -> dict[str, Any]:
    user, item = int(random.zipf(1.3) % 900), f"i{int(random.zipf(1.2)) % 700}"
    if random.random() < 0.1:
        return {"entity": "item", "id": item, "features": {"price": user % 9, "tags": [item, f"t{user % 5}"]}}
    features = {"user_id": user, "item_id": item, "price": user % 5, "previous": [f"i{user % 13}", item]}
    label = int(random.random() < 1 / (1 + np.exp(1.5 - user % 4)))
    return {
        "features": features,
        "label": label,
        "event_id": f"e{int(random.integers(0, 4000))}",
        "time_ms": FIRST_MS + 700 * place,
    }


def kills(count: int, seed: int = 11) -> list[Kill]:
    """Points to die at: each effect in turn, before, after and in the middle of one of its calls."""
    random = np.random.default_rng(seed)
    drawn = []
    for k in range(count):
        effect = list(EFFECTS)[k % len(EFFECTS)]
        call = int(random.integers(1, RARE.get(effect, 25) + 1))
        when = ("before", "after", "during")[(k // len(EFFECTS)) % 3]
        drawn.append(Kill(effect, call, when, int(random.integers(1, 400)) if when == "during" else 0))
    return drawn
