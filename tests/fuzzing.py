"""Bad input, made in quantity: JSON bodies that are nearly right, damaged bytes, messages of hostile values.

Everything is a function of a seed, so that a failure can be made again. `one_parse` puts one input through a parser
and returns what became of it: "ok", or the code of the error that a client would be told. Any other exception is a bug.
"""

import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import EncodeError, Message

from service.embedding_service_pb2 import LookupEmbeddingsRequest
from service.errors import as_service_error
from service.event_service_pb2 import PublishEventsRequest
from service.proto_wire import Messages
from service.scoring_service_pb2 import RankRequest, ScoreRequest
from service.wire import Requests
from trainer.codec import EntryDecoder, encode
from trainer.event_pb2 import EventBatch
from trainer.events import Inputs, RawEvents, derive, derive_batch
from trainer.schema import Schema
from trainer.settings import Limits

NOW_US = 1_700_000_000_000_000
DEEP = "[" * 3000
TEXTS = (
    "", "u1", "i0", "item", "user", "\0", "\ud800", "é", "日本", "💥", "a" * 256, "a" * 257, "a" * 5000, "NaN", "$time",
    "features", "-1", "1e400", "__proto__", "../..", "' OR 1=1", "%s%n", "\u202e", "{", "\n",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 0.5, -0.0, 1e18, 1.0000001e18, -1e300, 1e308, 5e-324, 2**31, 2**53, 2**53 + 1, 2**63 - 1, 2**63,
    -(2**63), -(2**63) - 1, 2**64, 10**30, 253_402_300_799_999, 253_402_300_800_000,
)  # fmt: skip
# What Python's own JSON cannot say: put in as text.
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "01",
    "1.",
    "0x1",
    "tru",
    "'a'",
    '"\\ud800"',
    '"\\x"',
    DEEP,
    "",
)
MEMBERS = (
    "context", "candidates", "rows", "time_ms", "top_k", "ids", "features", "label", "event_id", "entity", "id",
    "columns", "labels", "event_ids", "times_ms", "user_id", "item_id", "previous", "price", "tags", "content", "hour",
)  # fmt: skip


class JsonMaker:
    """JSON bodies of the requests and of events: the right shape with wrong things in it, or damaged bytes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._raws: list[str] = []

    def body(self) -> bytes:
        """One body."""
        random = self._random
        make = random.choice((self._score, self._rank, self._lookup, self._events, self._columns, self._anything))
        self._raws = []
        text = json.dumps(make(), ensure_ascii=random.random() < 0.5)
        for raw in self._raws:
            text = text.replace('"<raw>"', raw, 1)
        content = text.encode("utf-8", "surrogatepass")
        if random.random() < 0.1:
            content = content.replace(b"}, {", b"}\n{").strip(b"[]")
        return damaged(random, content) if random.random() < 0.4 else content

    def _odd(self, value: Any) -> Any:
        """The value, or now and then something else."""
        return self._anything() if self._random.random() < 0.06 else value

    def _anything(self) -> Any:
        random = self._random
        kind = random.randrange(9)
        if kind == 0:
            self._raws.append(random.choice(RAW))
            return "<raw>"
        if kind == 1:
            return [self._anything() for _ in range(random.randrange(4))]
        if kind == 2:
            return {random.choice(MEMBERS + TEXTS): self._anything() for _ in range(random.randrange(4))}
        if kind <= 4:
            return random.choice(TEXTS)
        return random.choice((*NUMBERS, None, True, False, random.random(), random.getrandbits(64)))

    def _id(self) -> Any:
        return self._odd(self._random.choice(("u1", "i0", 7, -3, "é", 2**60)))

    def _ids(self) -> Any:
        return self._odd([self._id() for _ in range(self._random.randrange(6))])

    def _row(self) -> Any:
        random = self._random
        row = {
            "user_id": self._id(), "item_id": self._id(), "previous": self._ids(), "price": self._odd(1.5),
            "tags": self._ids(), "content": self._odd([1.0, self._odd(2), 0.5]),
        }  # fmt: skip
        kept = {name: value for name, value in row.items() if random.random() < 0.5}
        if random.random() < 0.03:
            kept[random.choice(MEMBERS + TEXTS)] = self._anything()
        return self._odd(kept)

    def _rows(self) -> Any:
        return self._odd([self._row() for _ in range(self._random.randrange(4))])

    def _score(self) -> Any:
        request = {"candidates": self._rows()}
        if self._random.random() < 0.5:
            request["context"] = self._row()
        if self._random.random() < 0.3:
            request["time_ms"] = self._odd(1_650_000_000_000)
        if self._random.random() < 0.1:
            request["rows"] = self._rows()
        return self._odd(request)

    def _rank(self) -> Any:
        request = self._score()
        return {**request, "top_k": self._odd(3)} if isinstance(request, dict) else request

    def _lookup(self) -> Any:
        return self._odd({"ids": self._ids()})

    def _event(self) -> Any:
        event = {"features": self._row(), "label": self._odd(self._random.randrange(2))}
        if self._random.random() < 0.3:
            event |= {"event_id": self._odd("e1"), "time_ms": self._odd(1_650_000_000_000)}
        if self._random.random() < 0.3:
            event |= {"entity": self._odd("item"), "id": self._id()}
            event.pop("label", None)
        return self._odd(event)

    def _events(self) -> Any:
        return self._odd([self._event() for _ in range(self._random.randrange(4))])

    def _columns(self) -> Any:
        count = self._random.randrange(4)
        columns = {"user_id": [self._id() for _ in range(count)], "price": [self._odd(1.0) for _ in range(count)]}
        return {"columns": self._odd(columns), "labels": self._odd([self._odd(1) for _ in range(count)])}


def damaged(random: Random, content: bytes) -> bytes:
    """The same bytes with a few flipped, cut out, doubled or put in."""
    damaged_ = bytearray(content)
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(len(damaged_) + 1)
        kind = random.randrange(4)
        if kind == 0 and at < len(damaged_):
            damaged_[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del damaged_[at : at + random.randrange(20)]
        elif kind == 2:
            damaged_[at:at] = damaged_[at : at + random.randrange(20)]
        else:
            damaged_[at:at] = random.randbytes(random.randrange(1, 6))
    return bytes(damaged_)


def fill(random: Random, message: Message, *, depth: int = 0) -> None:
    """Fill a message with hostile values of the right wire types: any kind in a oneof, huge texts, NaN, extremes."""
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.45:
            continue
        number = random.choice((1, 1, 2, 5)) if field.is_repeated else 1
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(random, getattr(message, field.name), depth)
        elif field.message_type is not None:
            if depth < 4:
                for _ in range(number):
                    of = getattr(message, field.name)
                    inner = of.add() if field.is_repeated else of
                    inner.SetInParent()
                    fill(random, inner, depth=depth + 1)
        elif field.is_repeated:
            getattr(message, field.name).extend(_scalar(random, field) for _ in range(number))
        else:
            setattr(message, field.name, _scalar(random, field))


def _fill_map(random: Random, values: Any, depth: int) -> None:
    for _ in range(random.randrange(4)):
        name = random.choice(MEMBERS + TEXTS).encode("utf-8", "replace").decode()
        fill(random, values[name], depth=depth + 1)


def _scalar(random: Random, field: FieldDescriptor) -> Any:  # noqa: PLR0911 - one for each kind
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return random.randbytes(random.choice((0, 1, 4, 8, 8, 16, 24, 1000)))
        return random.choice((*TEXTS, *MEMBERS, "a" * 100_000)).encode("utf-8", "replace").decode()
    if kind in {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}:
        limit = 3e38 if kind == FieldDescriptor.CPPTYPE_FLOAT else 1e308
        return random.choice((0.0, 1.0, -1.0, 0.5, float("nan"), float("inf"), -float("inf"), limit, 1e-45))
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return random.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_ENUM:
        return random.choice((0, 1, 7))
    bits = 64 if kind in {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64} else 32
    if kind in {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}:
        return random.choice((0, 1, 2, 5, 1024, 2**bits - 1))
    return random.choice((0, 1, 2, -1, 5, 1024, 2 ** (bits - 1) - 1, -(2 ** (bits - 1))))


class Parsers:
    """Every way into the parsers of one schema, and one seeded maker of what to put into them."""

    def __init__(self, schema: Schema, limits: Limits, seed: int) -> None:
        self.schema = schema
        self.outcomes: Counter[str] = Counter()
        self._random = Random(seed)
        self._json = JsonMaker(self._random)
        self._requests = Requests(schema, limits)
        self._messages = Messages(self._requests)
        self._entries = EntryDecoder(schema)
        self._ways: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (self._json.body, lambda body: self._scored(self._requests.score(body))),
            (self._json.body, lambda body: self._scored(self._requests.rank(body)[0])),
            (self._json.body, self._requests.lookup),
            (self._json.body, lambda body: self._learned(self._requests.parser.parse(body, accepted_us=NOW_US)[0])),
            (self._json.body, lambda body: self._learned(self._entries.decode_entry({b"json": body}, NOW_US)[0])),
            (self._batch, lambda body: self._learned(self._entries.decode_entry({b"proto": body}, NOW_US)[0])),
            (self._message(ScoreRequest), lambda message: self._scored(self._messages.candidates(message))),
            (self._message(RankRequest), lambda message: self._scored(self._messages.candidates(message.score))),
            (self._message(LookupEmbeddingsRequest), self._messages.ids),
            (
                self._message(PublishEventsRequest),
                lambda message: self._learned(self._messages.events(message, NOW_US)[0]),
            ),
        ]

    def run(self, count: int) -> None:
        """So many inputs. Raises AssertionError, with the input, at the first that makes an error of ours."""
        for _ in range(count):
            make, take = self._random.choice(self._ways)
            given = make()
            try:
                take(given)
                self.outcomes["ok"] += 1
            except Exception as error:
                code = as_service_error(error).code
                self.outcomes[code] += 1
                if code == "internal":
                    raise AssertionError(f"{type(error).__name__}: {error}, from {given!r}") from error

    def _message(self, kind: Callable[[], Message]) -> Callable[[], Message]:
        def make() -> Message:
            message = kind()
            fill(self._random, message)
            return message

        return make

    def _batch(self) -> bytes:
        """Bytes of a batch: hostile values, or a right one damaged."""
        if self._random.random() < 0.5:
            batch = EventBatch()
            fill(self._random, batch)
            if self._random.random() < 0.7:
                batch.count = self._random.randrange(4)
            try:
                content = batch.SerializeToString()
            except EncodeError:
                content = b""
        else:
            good = [{"features": {"user_id": "u1", "previous": ["a", 2], "price": 2.0}, "label": 1}] * 3
            raw, _ = self._requests.parser.parse(json.dumps(good).encode(), accepted_us=NOW_US)
            content = encode(self.schema, raw)
        return damaged(self._random, content) if self._random.random() < 0.6 else content

    def _scored(self, candidates: Any) -> None:
        """What scoring makes of a request that was taken: all numbers finite."""
        for inputs in (candidates.inputs, candidates.context):
            if inputs is not None:
                self._derived(inputs, candidates.time_ms)

    def _derived(self, inputs: Inputs, time_ms: int) -> None:
        features = derive(self.schema, inputs, np.full(inputs.count, time_ms, np.int64))
        assert np.isfinite(features.floats_BM).all(), "a number that is not finite came through"

    def _learned(self, raw: RawEvents) -> None:
        """What the trainer makes of events that were taken: finite numbers, labels 0 or 1, the same over the log."""
        batch = derive_batch(self.schema, raw)
        assert np.isfinite(batch.features.floats_BM).all(), "a number that is not finite came through"
        labels = batch.labels_B[batch.entity_B < 0]
        assert ((labels == 0) | (labels == 1)).all(), "a label that is no outcome came through"
        if len(batch):
            again, rejected = self._entries.decode(encode(self.schema, raw), NOW_US)
            assert (again.inputs.count, rejected) == (raw.inputs.count, []), "the log's codec refuses what was taken"
