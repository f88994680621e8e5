"""What an operator asks for: one id inspected or forgotten, a table resized, versions listed, serving rolled back.

What changes the model goes into the event log as a command, and is done at its place among the events; the rest is
asked of the trainer over its control socket. Both live on this machine; where no trainer runs, what needs one says so.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np

from service.answers import Model, model_of
from service.errors import ServiceError
from service.live_model import STATUS_NAMES, LiveModel
from trainer.checkpoint import SaveInfo, listing
from trainer.commands import COMMAND_FIELD, MAX_CAPACITY, MIN_CAPACITY, Command, Forget, Resize, encode
from trainer.control import ask
from trainer.errors import ControlRefused, ControlUnavailable, SettingsError
from trainer.hashing import hash_values
from trainer.schema import check_memory
from trainer.settings import Settings
from trainer.stream import AsyncEventLog

INSPECT_S = 1.0  # how long an inspection waits for the trainer: it answers between two steps
STATUS_S = 1.0
ACTIVATE_S = 60.0  # a rollback of a model that fills the memory of a large machine
CHECKPOINT_S = 110.0

# What the trainer's refusals mean to a caller.
REFUSALS = {"unknown_checkpoint": "unknown_version", "malformed": "invalid", "busy": "overloaded"}


class OptimizerState(msgspec.Struct, forbid_unknown_fields=True):
    """What the optimizer keeps of an id; null where its kind keeps no such thing."""

    accumulator: float | None
    moment_norm: float | None
    wide_z: float | None
    wide_n: float | None


class InspectAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """One id of one table, as readers see it; `optimizer` and `sketch_estimate` only while a trainer runs (`note`)."""

    table: str
    id: str
    key: str
    status: str
    vector: list[float]
    count: int | None
    last_seen: str | None
    last_seen_ms: int | None
    optimizer: OptimizerState | None
    sketch_estimate: int | None
    note: str | None
    model: Model


class VersionInfo(msgspec.Struct, forbid_unknown_fields=True):
    """A kept checkpoint: `version` names it in calls. `active`: it is the one that is served."""

    version: int
    created: str | None
    step: int | None
    position: str | None
    model_version: str | None
    bytes: int
    format: int | None
    active: bool
    problem: str | None


class VersionsAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Kept checkpoints, the newest first. `publishing`: live, held or rolled_back; null where no trainer answers."""

    publishing: str | None
    reasons: list[str]
    versions: list[VersionInfo]


class ResizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Slots that the table is to have."""

    capacity: int


class CommandAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The command is in the log at `stream_id`, and is done when the trainer comes there.

    `checkpoints`: kept ones that were written before, and so may still hold what is forgotten.
    """

    stream_id: str
    checkpoints: list[int] = []


class ActivateAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Serving has gone to a kept checkpoint, as model version `model_version`; publishing is held until released."""

    version: int
    model_version: str
    seconds: float


class ReleaseAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """What is learned is shown again, from model version `model_version` on."""

    model_version: str


class CheckpointAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """A checkpoint that is on disk. `pause_s`: how long learning stood still for it."""

    version: int
    step: int
    position: str
    seconds: float
    pause_s: float


class Operations:
    """The operator's calls of one worker."""

    def __init__(self, settings: Settings, model: LiveModel, log: AsyncEventLog) -> None:
        self._settings, self._model, self._log = settings, model, log

    async def inspect(self, table_name: str, id_: str) -> InspectAnswer:
        """One id, its state in the trainer included. Raises ServiceError("unknown_id")."""
        table = self._model.table(table_name)
        key = int(hash_values([id_])[0])
        rows = self._model.lookup(table, np.array([key]))
        status = STATUS_NAMES[int(rows.status_N[0])]
        if status == "unknown":
            raise ServiceError("unknown_id", f"table {table.name} has no row for {id_[:64]!r}")
        seen = self._model.seen(table, key)
        known: dict[str, Any] = {}
        note = None
        try:
            known = await self._ask("inspect", INSPECT_S, table=table.name, key=key)
        except ServiceError as error:
            note = error.detail
        optimizer = None
        if known.get("found"):
            names = ("accumulator", "moment_norm", "wide_z", "wide_n")
            optimizer = OptimizerState(*(known[name] for name in names))
        return InspectAnswer(
            table=table.name,
            id=id_,
            key=str(key),
            status=status,
            vector=rows.vectors_ND[0].astype(np.float64).tolist(),
            count=None if seen is None else seen[1],
            last_seen=None if seen is None else rfc3339(seen[0]),
            last_seen_ms=None if seen is None else 1000 * seen[0],
            optimizer=optimizer,
            sketch_estimate=known.get("sketch_estimate"),
            note=note,
            model=msgspec.convert(model_of(rows.stamp), Model),
        )

    async def forget(self, table_name: str, id_: str) -> CommandAnswer:
        """Put into the log that an id is to be forgotten."""
        table = self._model.table(table_name)
        stream_id = await self._command(Forget(table.name, int(hash_values([id_])[0])))
        older = [info.number for info in await asyncio.to_thread(listing, self._settings.checkpoint_path)]
        return CommandAnswer(stream_id, older)

    async def resize(self, table_name: str, capacity: int) -> CommandAnswer:
        """Put into the log that a table gets another capacity."""
        table = self._model.table(table_name)
        if not MIN_CAPACITY <= capacity <= MAX_CAPACITY:
            raise ServiceError("invalid", f"capacity: got {capacity}, wanted {MIN_CAPACITY} to {MAX_CAPACITY}")
        try:
            check_memory(self._model.schema.with_capacities({table.name: capacity}), "capacity")
        except SettingsError as error:
            raise ServiceError("invalid", str(error)) from None
        return CommandAnswer(await self._command(Resize(table.name, capacity)))

    async def versions(self) -> VersionsAnswer:
        """Kept checkpoints, and what is served."""
        publishing, reasons, serving = None, [], None
        try:
            status = await self._ask("status", STATUS_S)
            publishing, reasons, serving = status["publishing"], status["reasons"], status["serving_checkpoint"]
        except ServiceError as error:
            reasons = [error.detail]
        kept = await asyncio.to_thread(listing, self._settings.checkpoint_path)
        return VersionsAnswer(publishing, reasons, [_version(info, serving) for info in kept])

    async def activate(self, version: str) -> ActivateAnswer:
        """Roll serving back to a kept checkpoint. Raises ServiceError("unknown_version")."""
        if not version.isdecimal():
            raise ServiceError("unknown_version", f"{version[:64]!r} is no version: wanted the number of a kept one")
        answer = await self._ask("activate", ACTIVATE_S, checkpoint=int(version))
        return ActivateAnswer(answer["checkpoint"], str(answer["version"]), answer["seconds"])

    async def release(self) -> ReleaseAnswer:
        """Show again what is learned."""
        return ReleaseAnswer(str((await self._ask("release", ACTIVATE_S))["version"]))

    async def create_checkpoint(self) -> CheckpointAnswer:
        """Write a checkpoint; returns when it is on disk."""
        saved = await self._ask("checkpoint", CHECKPOINT_S)
        return CheckpointAnswer(
            saved["checkpoint"], saved["step"], saved["position"], saved["seconds"], saved["pause_s"]
        )

    async def _command(self, command: Command) -> str:
        ids = await self._log.append([{COMMAND_FIELD: encode(command)}])
        return ids[-1]

    async def _ask(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Ask the trainer, in a thread: it may take as long as a step. Raises ServiceError."""
        run_path = self._settings.run_path
        try:
            return await asyncio.to_thread(ask, run_path, op, timeout_s=timeout_s, **arguments)
        except ControlUnavailable as error:
            raise ServiceError("no_trainer", str(error)) from None
        except ControlRefused as refusal:
            raise ServiceError(REFUSALS.get(refusal.code, "refused"), refusal.detail) from None


def capacity_of(body: bytes) -> int:
    """The capacity that the body of a resize asks for."""
    try:
        return msgspec.json.decode(body, type=ResizeRequest).capacity
    except msgspec.ValidationError as error:
        raise ServiceError("invalid", f'wanted {{"capacity": n}}: {error}') from None
    except msgspec.DecodeError as error:
        raise ServiceError("malformed", str(error)) from None


def _version(info: SaveInfo, serving: int | None) -> VersionInfo:
    return VersionInfo(
        version=info.number,
        created=None if info.created_us is None else rfc3339(info.created_us / 1e6),
        step=info.step,
        position=info.position,
        model_version=None if info.store_version is None else str(info.store_version),
        bytes=info.num_bytes,
        format=info.format,
        active=info.number == serving,
        problem=info.problem,
    )


def rfc3339(seconds: float) -> str:
    """RFC 3339, UTC.

    >>> rfc3339(0)
    '1970-01-01T00:00:00Z'
    """
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")
