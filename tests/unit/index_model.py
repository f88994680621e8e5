"""The id index as `trainer.index` describes it, over plain dicts and in as few words as possible. Slow, and obvious."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer import sketch
from trainer.index import EXPIRED, GOLDEN, ON_PROBATION, PRESSURE
from trainer.probe import EMPTY, REMOVED, WINDOW, home_slot, mix64
from trainer.schema import Table

ALWAYS = 10**9


@dataclass
class Held:
    """What is kept of an id that has a slot."""

    id: int
    row: int  # of its last sighting
    seen_s: int
    count: int


@dataclass
class Outcome:
    """What a batch did; slots are the table's own."""

    slots: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    evicted: list[tuple[int, int, int]] = field(default_factory=list)  # id, slot, reason
    unplaced: int = 0
    refused: int = 0


class IndexModel:
    """One table; `salt` is that of its admission, `grace` the rows that lfu spares."""

    def __init__(self, table: Table, *, salt: int, grace: int, clock: int) -> None:
        self.table, self.salt, self.grace, self.clock = table, salt, grace, clock
        self.held: dict[int, Held] = {}  # by slot
        self.removed: set[int] = set()
        self.sketch = np.zeros(64 * table.sketch_lines, np.uint8)
        self.sightings = 0

    def slot_of(self, id_: int) -> int:
        return next((slot for slot, held in self.held.items() if held.id == id_), -1)

    def assign(self, ids: Sequence[int], now_s: int) -> Outcome:
        outcome, first_row = Outcome(), self.clock
        for id_ in ids:
            slot = self._sighting(id_, first_row, now_s, outcome) if id_ not in (EMPTY, REMOVED) else -1
            outcome.slots.append(slot)
            self.clock += 1
        return outcome

    def _sighting(self, id_: int, first_row: int, now_s: int, outcome: Outcome) -> int:
        slot, fresh = self.slot_of(id_), False
        if slot < 0:
            slot, fresh = self._slot_for(id_, first_row, now_s, outcome), True
            if slot < 0:
                return -1
            if slot in self.held:
                reason = EXPIRED if self._is_expired(slot, now_s) else PRESSURE
                outcome.evicted.append((self.held[slot].id, slot, reason))
            self.removed.discard(slot)
        elif self.held[slot].row < first_row and self._is_expired(slot, now_s):
            outcome.evicted.append((id_, slot, EXPIRED))
            fresh = True
        if slot not in outcome.touched:
            outcome.touched.append(slot)
            outcome.fresh.append(fresh)
        count = 0 if fresh else self.held[slot].count
        if self.table.spec.eviction == "lfu" and not fresh:
            count = self._aged(slot)
        self.held[slot] = Held(id_, self.clock, now_s, count + 1)
        return slot

    def _slot_for(self, id_: int, first_row: int, now_s: int, outcome: Outcome) -> int:
        worth = self._worth(id_)
        if worth is None:
            outcome.refused += 1
            return -1
        window = list(self._window(id_))
        for slot in window:
            if slot not in self.held or (self.held[slot].row < first_row and self._is_expired(slot, now_s)):
                return slot
        free = [slot for slot in window if self.held[slot].row < first_row]
        if not free:
            outcome.unplaced += 1
            return -1
        old = [slot for slot in free if self.held[slot].row < self.clock - self.grace]
        once = [slot for slot in window if self.held[slot].count == 1]
        old_once = [slot for slot in once if slot in old]
        victims = old_once if old_once and len(once) * ON_PROBATION > len(window) else free
        victim = min(victims, key=lambda slot: self.held[slot].row)
        if self.table.spec.eviction == "lru":
            return victim
        if old:
            victim = min(old, key=lambda slot: (self._aged(slot), self.held[slot].row))
        if worth <= self._aged(victim):
            outcome.refused += 1
            return -1
        return victim

    def _worth(self, id_: int) -> int | None:
        admission, capacity = self.table.spec.admission, self.table.capacity
        start = round(admission.pressure_from * capacity)
        above, room = max(len(self.held) - start, 0), 2 * max(capacity - start, 1)
        if admission.kind == "all":
            return ALWAYS
        if admission.kind == "probability":
            chance = round(admission.probability * 2**30)
            chance -= chance * above // room
            state = (int(mix64(id_ ^ self.salt)) + self.clock * int(GOLDEN)) % 2**64
            return ALWAYS if int(mix64(np.uint64(state))) >> 34 < chance else None  # type: ignore[arg-type]
        counters = list(self._counters(id_))
        seen = min(255, 1 + int(self.sketch[counters].min()))
        for counter in counters:
            self.sketch[counter] = max(self.sketch[counter], seen)
        self.sightings += 1
        if self.sightings == self.halve_every:
            self.sketch //= 2
            self.sightings = 0
        return seen if seen >= admission.min_count + math.ceil(admission.min_count * above / room) else None

    @property
    def halve_every(self) -> int:
        return self.table.halve_every

    def estimate(self, id_: int) -> int:
        return int(self.sketch[list(self._counters(id_))].min())

    def _counters(self, id_: int) -> Iterator[int]:
        hashed = int(mix64(id_ ^ self.salt))
        line = (hashed >> 32) * self.table.sketch_lines >> 32
        for quarter in range(4):
            yield 64 * line + 16 * quarter + (hashed >> 4 * quarter) % 16

    def _window(self, id_: int) -> Iterator[int]:
        capacity = self.table.capacity
        home = int(home_slot(id_, capacity))
        for step in range(min(WINDOW, capacity)):
            yield (home + step) % capacity

    def _is_expired(self, slot: int, now_s: int) -> bool:
        return self.table.ttl_s is not None and now_s - self.held[slot].seen_s > self.table.ttl_s

    def _aged(self, slot: int) -> int:
        half_life, held = self.table.spec.lfu_half_life, self.held[slot]
        return held.count >> (self.clock // half_life - held.row // half_life)

    def remove(self, ids: Sequence[int]) -> list[int]:
        slots = []
        for id_ in ids:
            if (slot := self.slot_of(id_)) >= 0:
                del self.held[slot]
                self.removed.add(slot)
                slots.append(slot)
            if len(self.sketch):
                self.sketch[list(self._counters(id_))] = 0
        return slots

    def expire(self, slots: Sequence[int], now_s: int) -> list[int]:
        gone = [slot for slot in slots if slot in self.held and self._is_expired(slot, now_s)]
        for slot in gone:
            del self.held[slot]
            self.removed.add(slot)
        return gone

    def resized(self, table: Table, *, grace: int) -> "IndexModel":
        new = IndexModel(table, salt=self.salt, grace=grace, clock=self.clock)
        new.sightings = self.sightings
        if len(self.sketch):
            new.sketch = sketch.resized(self.sketch.reshape(-1, 64), table.sketch_lines).reshape(-1)
        slots = sorted(self.held, key=lambda slot: -self.held[slot].row)
        if table.spec.eviction == "lfu":
            slots.sort(key=lambda slot: -self._aged(slot))
        for slot in slots:
            free = [place for place in new._window(self.held[slot].id) if place not in new.held]
            if free:
                new.held[free[0]] = self.held[slot]
        return new
