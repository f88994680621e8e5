"""What a running trainer does when it is asked over its control socket (`trainer.control`)."""

import logging
import os
import time
from typing import TYPE_CHECKING

import numpy as np

from trainer.control import Request
from trainer.errors import CheckpointError, ControlRefused, LivebedError, StoreUnavailable

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from trainer.loop import Trainer


def answer(trainer: "Trainer", request: Request) -> None:
    """Do what is asked and answer, or say why not; nothing that is asked ends the trainer."""
    known = {
        "status": status,
        "checkpoint": checkpoint,
        "activate": activate,
        "release": release,
        "inspect": inspect,
    }
    if request.op not in known:
        request.refuse("unknown_op", f"wanted one of {', '.join(known)}, got {request.op[:64]!r}")
        return
    try:
        known[request.op](trainer, request)
    except ControlRefused as refusal:
        request.refuse(refusal.code, refusal.detail)
    except StoreUnavailable as error:
        request.refuse("no_room", str(error))
    except (LivebedError, OSError) as error:
        request.refuse("failed", str(error))
    except Exception as error:
        logger.exception("a request for %s failed", request.op)
        request.refuse("failed", f"{type(error).__name__}: {error}")


def status(trainer: "Trainer", request: Request) -> None:
    """Where the trainer stands, and whether what it learns is shown."""
    place, outlet = trainer.state.place, trainer.outlet
    request.answer(
        step=place.step,
        position=place.entry_id,
        watermark_us=place.watermark_us,
        version=outlet.version,
        publishing=outlet.mode,
        reasons=outlet.reasons,
        serving_checkpoint=outlet.serving_checkpoint,
        rewinds=trainer.num_rewinds,
        pid=os.getpid(),
    )


def checkpoint(trainer: "Trainer", request: Request) -> None:
    """Write a checkpoint now; answered when it is on disk."""
    if not trainer.may_save:
        raise ControlRefused("held", f"what is held back is not saved either ({', '.join(trainer.outlet.reasons)})")
    trainer.ask_to_save(request)


def activate(trainer: "Trainer", request: Request) -> None:
    """Serve a kept checkpoint; learning goes on, and nothing of it is shown until `release`."""
    started_s = time.perf_counter()
    number = request.arguments.get("checkpoint")
    if type(number) is not int:
        raise ControlRefused("malformed", "checkpoint: wanted the number of a kept one")
    try:
        version = trainer.roll_back(number)
    except CheckpointError as error:
        raise ControlRefused("unknown_checkpoint", str(error)) from None
    request.answer(checkpoint=number, version=version, seconds=time.perf_counter() - started_s)


def release(trainer: "Trainer", request: Request) -> None:
    """Show what has been learned, and every step from here on."""
    request.answer(version=trainer.release())


def inspect(trainer: "Trainer", request: Request) -> None:
    """All that is kept of one id of one table."""
    table = trainer.state.schema.table(str(request.arguments.get("table")))
    key = request.arguments.get("key")
    if table is None or type(key) is not int or not -(2**63) <= key < 2**63:
        raise ControlRefused("malformed", "wanted `table`, the name of one, and `key`, a hashed id (int64)")
    row = trainer.state.tables.row_of(table.index, key)
    if row is None:
        request.answer(found=False)
        return
    request.answer(
        found=True,
        count=row.count,
        seen_s=row.seen_s,
        accumulator=row.accumulator,
        wide_z=row.wide_z,
        wide_n=row.wide_n,
        row_norm=float(np.linalg.norm(row.row_D)),
        moment_norm=None if row.moments_D is None else float(np.linalg.norm(row.moments_D)),
        sketch_estimate=row.sketch_estimate,
    )
