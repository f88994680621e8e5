"""Turns on a worker's loop: who goes first, who is refused, who does no work. On a real event loop."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from service.admission import Admission
from service.errors import ServiceError
from service.exchange import Exchange
from service.quota import MAX_CLIENTS, Quotas
from trainer.settings import QueueSettings, QuotaSettings

LARGE = 100_000  # bytes: 5 ms at the first guess


def exchange(route: str, timeout_s: float = 5.0) -> Exchange:
    made = Exchange(None)
    made.route = route
    made.limit(timeout_s)
    return made


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 20))


def test_a_read_that_comes_later_goes_before_writes_that_wait() -> None:
    begun: list[str] = []

    async def scene() -> None:
        admission = Admission(QueueSettings())

        async def ask(kind: str) -> None:
            one = exchange(kind)
            await admission.enter(one, admission.reads if kind == "read" else admission.writes, LARGE)
            begun.append(kind)
            time.sleep(0.002)  # holds the loop, as parsing does
            one.finish()

        writes = [asyncio.create_task(ask("write")) for _ in range(4)]
        while "write" not in begun:
            await asyncio.sleep(0)
        reads = [asyncio.create_task(ask("read")) for _ in range(2)]
        await asyncio.gather(*writes, *reads)

    run(scene())
    assert begun.index("read") <= 2  # a write may have been given its turn just before
    assert begun[-2:] == ["write", "write"]


def test_work_that_waits_is_bounded_by_its_estimate_and_counts_for_its_lane_alone() -> None:
    async def scene() -> None:
        admission = Admission(QueueSettings(write_ms=15))
        waiting = [asyncio.create_task(admission.enter(exchange("w"), admission.writes, LARGE)) for _ in range(5)]
        await asyncio.sleep(0)
        refused = [task for task in waiting if task.done()]
        assert len(refused) == 3  # two of 5 ms fit, the third would not
        for task in refused:
            error = task.exception()
            assert isinstance(error, ServiceError) and error.code == "overloaded"
        assert await admission.enter(exchange("r"), admission.reads, 100) is False
        assert await asyncio.gather(*(task for task in waiting if task not in refused)) == [True, True]

    run(scene())


def test_who_waited_past_the_deadline_does_no_work() -> None:
    async def scene() -> None:
        admission = Admission(QueueSettings())
        late = asyncio.create_task(admission.enter(exchange("w", timeout_s=0.01), admission.writes, LARGE))
        await asyncio.sleep(0)
        time.sleep(0.02)
        with pytest.raises(ServiceError, match="deadline_exceeded"):
            await late

    run(scene())


def test_a_cancelled_request_gives_its_place_to_the_next() -> None:
    async def scene() -> None:
        admission = Admission(QueueSettings(write_ms=8))
        first = asyncio.create_task(admission.enter(exchange("w"), admission.writes, LARGE))
        await asyncio.sleep(0)
        first.cancel()
        second = asyncio.create_task(admission.enter(exchange("w"), admission.writes, 10_000))
        assert await second is True
        assert first.cancelled()
        assert admission.writes.waiting_s == 0.0

    run(scene())


def test_what_a_route_costs_is_learned() -> None:
    async def scene() -> None:
        admission = Admission(QueueSettings(write_ms=60))
        for _ in range(50):
            one = exchange("w")
            await admission.enter(one, admission.writes, LARGE)
            time.sleep(0.02)
            one.finish()
        waiting = [asyncio.create_task(admission.enter(exchange("w"), admission.writes, LARGE)) for _ in range(8)]
        await asyncio.sleep(0)
        assert 2 <= sum(not task.done() for task in waiting) <= 4  # of 20 ms each, where the first guess was 5
        await asyncio.gather(*waiting, return_exceptions=True)

    run(scene())


def test_only_so_many_clients_are_remembered() -> None:
    quotas = Quotas(QuotaSettings(ids_per_s=1, burst=1))
    for client in range(MAX_CLIENTS + 1):
        quotas.charge(str(client), 5, now_s=0.0)
    quotas.check("0", now_s=0.0)  # forgotten: a full bucket again
    with pytest.raises(ServiceError, match="quota_exceeded"):
        quotas.check("1", now_s=0.0)
