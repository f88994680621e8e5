"""Whether one JSON schema takes all that another does (of those that msgspec writes): what an old client loses."""

from typing import Any

Json = dict[str, Any]
Schemas = dict[str, Json]

AT_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
AT_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
SAME = ("pattern", "format", "multipleOf")


def lost(old: Json, new: Json, schemas: tuple[Schemas, Schemas], place: str, *, sent: bool) -> list[str]:
    """What the new schema takes from a caller who sends (`sent`) or reads values of the old one; `schemas` by `$ref`.

    >>> lost({"type": "number"}, {"type": "integer"}, ({}, {}), "price", sent=True)
    ['price: took number, now takes integer']
    >>> lost({"type": "number"}, {"type": "integer"}, ({}, {}), "price", sent=False)
    []
    """
    return _Pair(schemas, sent=sent).values(old, new, place)


class _Pair:
    """Compares along two trees; a pair of named schemas is compared once, so one may contain itself."""

    def __init__(self, schemas: tuple[Schemas, Schemas], *, sent: bool) -> None:
        self._schemas, self._sent = schemas, sent
        self._compared: dict[tuple[str, str], list[str]] = {}

    def values(self, old: Json, new: Json, place: str) -> list[str]:
        """Every value of the narrower schema must be one of the wider: sent, the new one has to be the wider."""
        names = old.get("$ref", ""), new.get("$ref", "")
        if not all(names):
            return self._fits(old, new, place)
        if names not in self._compared:
            self._compared[names] = []  # while it is under way
            self._compared[names] = self._fits(old, new, place)
        return self._compared[names]

    def _fits(self, old: Json, new: Json, place: str) -> list[str]:
        olds, news = self._variants(old, 0), self._variants(new, 1)
        found: list[str] = []
        for one in olds if self._sent else news:
            others = news if self._sent else olds
            pairs = [(one, other) if self._sent else (other, one) for other in others]
            tried = [(was.get("type") != now.get("type"), self._variant(was, now, place)) for was, now in pairs]
            if all(reasons for _, reasons in tried):  # what is said is about the one that is most alike
                found += min(tried, key=lambda one: (one[0], len(one[1])))[1]
        return found

    def _variants(self, schema: Json, side: int) -> list[Json]:
        """A schema as alternatives of one type each."""
        if "$ref" in schema:
            return self._variants(self._schemas[side][schema["$ref"].rpartition("/")[2]], side)
        for some in ("anyOf", "oneOf"):
            if some in schema:
                return [variant for one in schema[some] for variant in self._variants(one, side)]
        if isinstance(schema.get("type"), list):
            return [schema | {"type": kind} for kind in schema["type"]]
        return [schema]

    def _variant(self, old: Json, new: Json, place: str) -> list[str]:
        narrow, wide = (old, new) if self._sent else (new, old)
        kind, allowed = narrow.get("type"), wide.get("type")
        if allowed is not None and kind != allowed and (kind, allowed) != ("integer", "number"):
            verb = "took" if self._sent else "had"
            now = "takes" if self._sent else "has"
            return [f"{place}: {verb} {old.get('type', 'anything')}, now {now} {new.get('type', 'anything')}"]
        found = self._bounds(narrow, wide, place) + self._choices(narrow, wide, place)
        if "items" in old and "items" in new:
            found += self.values(old["items"], new["items"], f"{place}[]")
        return found + self._members(old, new, place)

    def _bounds(self, narrow: Json, wide: Json, place: str) -> list[str]:
        sides = [(name, 1) for name in AT_MOST] + [(name, -1) for name in AT_LEAST]
        found = [
            name
            for name, sign in sides
            if name in wide and (name not in narrow or sign * narrow[name] > sign * wide[name])
        ]
        found += [name for name in SAME if name in wide and narrow.get(name) != wide[name]]
        old, new = (narrow, wide) if self._sent else (wide, narrow)
        return [f"{place}: {name} was {old.get(name)}, now {new.get(name)}" for name in found]

    def _choices(self, narrow: Json, wide: Json, place: str) -> list[str]:
        given, allowed = (one.get("enum", [one["const"]] if "const" in one else None) for one in (narrow, wide))
        if allowed is None:
            return []
        if given is None:
            return [f"{place}: was not limited to {allowed}"]
        more = [value for value in given if value not in allowed]
        return [
            f"{place}: {value!r} is {'gone' if self._sent else 'new, and readers do not know it'}" for value in more
        ]

    def _members(self, old: Json, new: Json, place: str) -> list[str]:
        before, after = old.get("properties", {}), new.get("properties", {})
        found = [f"{place}.{name}: is gone" for name in before if name not in after]
        narrow, wide = (old, new) if self._sent else (new, old)
        what = "is now required" if self._sent else "is no longer always there"
        needed = sorted(set(wide.get("required", [])) - set(narrow.get("required", [])) - (set(before) - set(after)))
        found += [f"{place}.{name}: {what}" for name in needed]
        open_ = old.get("additionalProperties", True), new.get("additionalProperties", True)
        if (
            self._sent
            and "object" in {old.get("type"), new.get("type")}
            and open_[0] is not False
            and open_[1] is False
        ):
            found.append(f"{place}: took any member, now takes only those it names")
        for name in (name for name in before if name in after):
            found += self.values(before[name], after[name], f"{place}.{name}")
        if all(isinstance(one, dict) for one in open_):
            found += self.values(open_[0], open_[1], f"{place}.*")
        return found
