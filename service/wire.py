"""JSON and MessagePack in: requests decoded and checked in C against the configuration's own types, limits included.

The types are made from the schema once (`EventParser.Row` is a row of its inputs), so an unknown feature, a wrong type
or a string that is too long is found while parsing; what is left to do per value in Python is nothing.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from service.errors import ServiceError, Violation, too_many
from service.live_model import Candidates
from trainer.event_json import EventParser, TimeMs
from trainer.events import Inputs
from trainer.hashing import hash_values
from trainer.schema import Schema
from trainer.settings import Limits

PATH = re.compile(r" - at `\$?(.*)`$", re.DOTALL)
STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^\[\]]+)")
UNKNOWN_FIELD = re.compile(r"unknown field `(.*)`", re.DOTALL)
# Members that hold inputs by name: what follows their dot is one name, dots and all.
HOLDERS = ("context.", "features.", "columns.")

TopK = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Decoders:
    """Of one format."""

    name: str
    score: Any
    rank: Any
    lookup: Any

    @classmethod
    def of(cls, name: str, module: Any, requests: "Requests") -> "Decoders":
        """Of a module of msgspec."""
        types = (requests.ScoreRequest, requests.RankRequest, requests.LookupRequest)
        return cls(name, *(module.Decoder(kind) for kind in types))


class Requests:
    """Decoders of one schema's requests, with its limits."""

    def __init__(self, schema: Schema, limits: Limits) -> None:
        self.schema = schema
        self.limits = limits
        self.parser = EventParser(schema, max_string=limits.string_chars)
        row, rows = self.parser.Row, list_of(self.parser.Row)
        options: dict[str, Any] = {"forbid_unknown_fields": True, "gc": False}
        fields: list[Any] = [
            ("context", row | None, None),
            ("candidates", rows | None, None),
            ("rows", rows | None, None),
            ("time_ms", TimeMs | None, None),
        ]
        self.ScoreRequest: Any = msgspec.defstruct("ScoreRequest", fields, **options)
        self.RankRequest: Any = msgspec.defstruct("RankRequest", [*fields, ("top_k", TopK | None, None)], **options)
        self.LookupRequest: Any = msgspec.defstruct("LookupRequest", [("ids", list_of(self.parser.Id))], **options)
        self._json = Decoders.of("JSON", msgspec.json, self)
        self._msgpack = Decoders.of("MessagePack", msgspec.msgpack, self)

    def score(self, body: bytes, *, msgpack: bool = False) -> Candidates:
        """Candidates of a `/v1/score` body. Raises ServiceError, like everything here."""
        decoders = self._msgpack if msgpack else self._json
        return self.candidates(decoded(decoders.score.decode, body, decoders.name))

    def rank(self, body: bytes, *, msgpack: bool = False) -> tuple[Candidates, int | None]:
        """Candidates of a `/v1/rank` body, and how many of the best are wanted (None: all)."""
        decoders = self._msgpack if msgpack else self._json
        request = decoded(decoders.rank.decode, body, decoders.name)
        return self.candidates(request), self.top_k(request.top_k)

    def lookup(self, body: bytes, *, msgpack: bool = False) -> npt.NDArray[np.int64]:
        """Hashed ids of a lookup's body."""
        decoders = self._msgpack if msgpack else self._json
        request = decoded(decoders.lookup.decode, body, decoders.name)
        if len(request.ids) > self.limits.ids:
            raise too_many("ids", len(request.ids), self.limits.ids)
        return hash_values(request.ids)

    def convert(self, request: dict[str, Any]) -> Candidates:
        """Candidates of a score request that came as Python values (gRPC): the same checks, the same words."""
        return self.candidates(decoded(lambda values: msgspec.convert(values, self.ScoreRequest), request, "a request"))

    def candidates(self, request: Any) -> Candidates:
        """Columns of a decoded request."""
        rows = request.candidates if request.candidates is not None else request.rows
        if rows is None or (request.candidates is not None and request.rows is not None):
            raise _invalid("", "a request has `candidates` (beside a `context` or not), or `rows`")
        if request.rows is not None and request.context is not None:
            raise _invalid("/context", "`rows` stand for themselves: with a `context`, send `candidates`")
        if len(rows) > self.limits.candidates:
            raise too_many("candidates", len(rows), self.limits.candidates)
        inputs = self.parser.inputs(rows)
        context = self.parser.inputs([request.context]) if request.context is not None else None
        return self.checked(Candidates(inputs, context, request.time_ms or time.time_ns() // 1_000_000))

    def checked(self, candidates: Candidates) -> Candidates:
        """The same, if no row gives more features than the limit."""
        limit = self.limits.features
        if len(self.schema.inputs) > limit:  # else none can
            most = most_given(candidates.inputs)
            if most > limit:
                raise too_many("features", most, limit)
        return candidates

    def top_k(self, top_k: int | None) -> int | None:
        """The same, if it is within the limit."""
        if top_k is not None and top_k > self.limits.top_k:
            raise too_many("top_k", top_k, self.limits.top_k)
        return top_k


def list_of(item: Any) -> Any:
    """The type of a list, of a type made at run time."""
    return list[item]


def most_given(inputs: Inputs) -> int:
    """The largest number of inputs that one row gives."""
    given_B = np.zeros(inputs.count, np.int64)
    for column in inputs.columns.values():
        given_B += 1 if column.given_B is None else column.given_B
    return int(given_B.max(initial=0))


def decoded(decode: Callable[[Any], Any], body: Any, form: str) -> Any:
    """What a decoder makes of a body. Raises ServiceError that says what is wrong where; `form`: what it should be."""
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        _refuse(error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceError("malformed", f"the body is not valid {form}: {error}") from None


def _refuse(error: msgspec.ValidationError) -> NoReturn:
    """A validation error in our grammar: the place as a JSON pointer, an unknown feature by its name."""
    text = str(error)
    sentence, pointer = PATH.sub("", text), pointer_of(text)
    unknown = UNKNOWN_FIELD.search(sentence)
    if unknown is None:
        raise _invalid(pointer, sentence) from None
    name = unknown.group(1)
    in_a_row = pointer != ""  # the body itself has no features
    pointer = f"{pointer}/{_escaped(name)}"
    if not in_a_row:
        raise _invalid(pointer, f"{name!r} is no member of this request") from None
    detail = f"{name!r} is no input of the configuration (GET /v1/info lists them)"
    raise ServiceError("unknown_feature", detail, violations=[Violation(pointer, detail)]) from None


def pointer_of(message: str) -> str:
    """The JSON pointer of a msgspec message's path.

    >>> pointer_of("Expected `int`, got `str` - at `$.candidates[3].user_id`")
    '/candidates/3/user_id'
    """
    path = PATH.search(message)
    text = path.group(1).lstrip(".") if path else ""
    steps: list[str] = []
    for number, name in STEP.findall(text):
        holder = next((holder for holder in HOLDERS if not steps and name.startswith(holder)), "")
        steps += [holder[:-1], name[len(holder) :]] if holder else [number or name]
    return "".join(f"/{_escaped(step)}" for step in steps)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _invalid(pointer: str, detail: str) -> ServiceError:
    return ServiceError("invalid", detail, violations=[Violation(pointer, detail)])
