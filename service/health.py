"""Whether this worker can answer: a canary on the live model, the trainer's heartbeat, the event log.

    ok         all is well
    degraded   reads are answered, but the model stands still (no heartbeat, or what is learned is held back) or events
               cannot be accepted (no log)
    not_ready  nothing can be answered: no store yet, a canary that fails, or a drain

Only `not_ready` takes a worker out of rotation: half a service is better than none, and every answer says its age.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from service.live_model import LiveModel
from trainer import board
from trainer.errors import LivebedError, LogError

Status = Literal["ok", "degraded", "not_ready"]

# The trainer sets its heartbeat at every step and at least every 20 ms when idle; a busy machine may hold it up for a
# second or two. Larger hides a dead trainer, smaller reports a slow one.
MAX_HEARTBEAT_AGE_S = 5.0

DRAIN_LOOK_S = 0.1  # between looks of a stream that rests: how long it may hold a drain up


@dataclass(frozen=True)
class Check:
    """One thing looked at. A failed one that is `needed` makes the worker not ready, another makes it degraded."""

    name: str
    ok: bool
    needed: bool
    detail: str


@dataclass(frozen=True)
class Report:
    """What was found."""

    checks: tuple[Check, ...]

    @property
    def status(self) -> Status:
        """The worst of the checks."""
        failed = [check for check in self.checks if not check.ok]
        if any(check.needed for check in failed):
            return "not_ready"
        return "degraded" if failed else "ok"

    def ok(self, name: str) -> bool:
        """Whether a check by that name was passed."""
        return all(check.ok for check in self.checks if check.name == name)

    def as_json(self, *, verbose: bool) -> dict[str, Any]:
        """The body of `/readyz`, its checks included if asked for."""
        if not verbose:
            return {"status": self.status}
        checks = [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in self.checks]
        return {"status": self.status, "checks": checks}


class Health:
    """Checks one worker. `ping` asks the event log and raises LogError; it brings its own, short deadline."""

    def __init__(self, model: LiveModel, ping: Callable[[], Awaitable[None]], metrics: Path) -> None:
        self.draining = False
        self.started = False  # set for good once a model was attached and the kernels are compiled
        self.attach_problem = "starting"
        self._model = model
        self._ping = ping
        self._metrics = metrics

    async def rest(self, seconds: float) -> None:
        """Return after that time, or when the drain begins: what lasts as long as its caller likes ends with it."""
        until_s = time.monotonic() + seconds
        while not self.draining and (left_s := until_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, DRAIN_LOOK_S))

    async def report(self) -> Report:
        """Look at everything: some hundred microseconds, and a round trip to the log."""
        if self.draining:
            return Report((Check("drain", ok=False, needed=True, detail="draining: this worker is about to end"),))
        if not self.started:
            return Report((Check("store", ok=False, needed=True, detail=self.attach_problem),))
        return Report((self._canary(), self._heartbeat(), self._publishing(), await self._log()))

    def _canary(self) -> Check:
        try:
            detail = self._model.canary()
        except LivebedError as error:
            return Check("canary", ok=False, needed=True, detail=str(error))
        return Check("canary", ok=True, needed=True, detail=detail)

    def _heartbeat(self) -> Check:
        try:
            state = self._model.state()
        except LivebedError as error:
            return Check("trainer", ok=False, needed=False, detail=str(error))
        age_s = time.time() - state.heartbeat_us / 1e6
        alive = not state.stopped and age_s <= MAX_HEARTBEAT_AGE_S
        what = "said goodbye" if state.stopped else "last heartbeat"
        return Check("trainer", ok=alive, needed=False, detail=f"{what} {age_s:.1f} s ago (process {state.writer_pid})")

    def _publishing(self) -> Check:
        if board.read(self._metrics).value("livebed_publishing_held") == 1:
            detail = "held: the last good version is served, not what is learned (`livebed model status` says why)"
            return Check("publishing", ok=False, needed=False, detail=detail)
        return Check("publishing", ok=True, needed=False, detail="live")

    async def _log(self) -> Check:
        try:
            await self._ping()
        except LogError as error:
            return Check("log", ok=False, needed=False, detail=str(error))
        return Check("log", ok=True, needed=False, detail="answers")
