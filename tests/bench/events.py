"""What an event costs before it is learned: decoding from protobuf, parsing from JSON, hashing."""

import json

import numpy as np

from tests.bench.harness import arguments, emit, goal, median_s
from trainer.codec import EntryDecoder, encode
from trainer.events import derive_batch
from trainer.schema import Schema
from trainer.settings import Settings

NUM_FEATURES = 10
EVENTS_PER_ENTRY = 64


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    repeats = 200 if options.quick else 2000
    features = {f"feature_{k}": {"kind": "categorical", "table": "all"} for k in range(NUM_FEATURES)}
    schema = Schema.from_settings(Settings.load(None, {"tables": {"all": {}}, "features": features}, {}))
    rng = np.random.default_rng(0)
    rows = [
        {"features": {name: f"value-{rng.integers(10_000)}" for name in features}, "label": int(rng.integers(2))}
        for _ in range(EVENTS_PER_ENTRY)
    ]
    decoder = EntryDecoder(schema)
    body = json.dumps(rows).encode()
    raw, _ = decoder.parser.parse(body, accepted_us=1)
    payload = encode(schema, raw)
    microseconds = 1e6 / EVENTS_PER_ENTRY
    decode_us = median_s(lambda: derive_batch(schema, decoder.decode(payload, 1)[0]), repeats=repeats) * microseconds
    results = {
        "events_per_entry": EVENTS_PER_ENTRY,
        "features": NUM_FEATURES,
        "protobuf_decode_us_per_event": decode_us,
        "json_parse_us_per_event": median_s(lambda: decoder.parser.parse(body, accepted_us=1), repeats=repeats)
        * microseconds,
        "protobuf_encode_us_per_event": median_s(lambda: encode(schema, raw), repeats=repeats) * microseconds,
        "bytes_per_event": len(payload) / EVENTS_PER_ENTRY,
    }
    emit("events", results, [goal("protobuf decode", decode_us, "us/event of 10 features", at_most=2.0)], options.json)


if __name__ == "__main__":
    main()
