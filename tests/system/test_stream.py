"""The event log against a real Valkey: order, round trips, and each way in which it can fail."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from trainer.broker import Broker
from trainer.errors import LogFull, LogOverloaded, LogTruncated, LogUnavailable
from trainer.stream import MAX_COUNTED, AsyncEventLog, EventLog

MIB = 1024 * 1024


def numbered(count: int, size: int = 1) -> list[dict[bytes, bytes]]:
    return [{b"proto": b"%d" % n + b"x" * (size - 1)} for n in range(count)]


@contextmanager
def frozen(broker: Broker) -> Iterator[None]:
    """A broker that is there and does not answer."""
    assert broker.pid
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def test_entries_come_back_in_order_with_their_ids(log: EventLog) -> None:
    ids = log.append(numbered(300))
    assert log.read("0-0", count=1000) == list(zip(ids, numbered(300), strict=True))
    assert log.read(ids[99], count=2) == [(ids[100], {b"proto": b"100"}), (ids[101], {b"proto": b"101"})]
    assert log.read(ids[-1]) == []


def test_a_plain_xadd_from_any_client_is_an_entry(broker: Broker, log: EventLog) -> None:
    with redis.Redis.from_url(broker.url) as producer:
        producer.xadd(log.key, {"json": '{"user": "u1", "label": 1}'})
    ((_, fields),) = log.read("0-0")
    assert json.loads(fields[b"json"]) == {"user": "u1", "label": 1}


def test_a_read_waits_no_longer_than_it_was_told(log: EventLog) -> None:
    begin_s = time.monotonic()
    assert log.read("0-0", block_ms=50) == []
    assert 0.04 < time.monotonic() - begin_s < 1.0


def test_a_waiting_read_returns_when_an_entry_arrives(broker: Broker, log: EventLog) -> None:
    async def read_and_append() -> tuple[list[str], list[str]]:
        writer = AsyncEventLog(broker.url, log.key)
        reading = asyncio.to_thread(log.read, "0-0", block_ms=1000)
        found, ids = await asyncio.gather(reading, writer.append(numbered(1)))
        await writer.close()
        return [entry_id for entry_id, _ in found], ids

    found, ids = asyncio.run(read_and_append())
    assert found == ids


def test_lag_counts_what_waits_after_a_position(broker: Broker, log: EventLog) -> None:
    assert log.lag("0-0") == 0
    ids = log.append(numbered(500))
    assert log.lag("0-0") == 500
    position = log.read("0-0", count=120)[-1][0]
    assert log.lag(position) == 380
    log.trim_before(ids[100], exact=True)
    log.append(numbered(20))
    assert log.lag(position) == 400
    with EventLog(broker.url, log.key) as newcomer:
        assert newcomer.lag(ids[200]) == 319
        assert newcomer.num_added_at(ids[200]) == 201
        assert newcomer.lag(log.last_id()) == 0


def test_lag_met_in_the_middle_of_a_long_log_is_at_least_its_bound(broker: Broker, log: EventLog) -> None:
    ids = log.append(numbered(MAX_COUNTED + 1500))
    with EventLog(broker.url, log.key) as newcomer:
        assert newcomer.lag(ids[0]) == MAX_COUNTED
        assert newcomer.num_added_at(ids[0]) is None
        newcomer.check_position(ids[0], num_read=1)
        assert newcomer.lag(ids[0]) == MAX_COUNTED + 1499


def test_trimming_keeps_the_position_itself(log: EventLog) -> None:
    ids = log.append(numbered(1000))
    assert log.trim_before(ids[700]) <= 700
    log.trim_before(ids[700], exact=True)
    assert log.length() == 300
    assert log.read(ids[700], count=1)[0][0] == ids[701]


def test_a_log_trimmed_beyond_the_position_is_refused(log: EventLog) -> None:
    ids = log.append(numbered(100))
    log.trim_before(ids[50], exact=True)
    with pytest.raises(LogTruncated, match=f"from {ids[20]}: it now begins at {ids[50]}, and 50 entries"):
        log.read(ids[20])
    with pytest.raises(LogTruncated):
        log.read("0-0")


def test_a_log_trimmed_up_to_the_position_continues_when_its_count_is_known(log: EventLog) -> None:
    ids = log.append(numbered(100))
    log.trim_before(ids[50], exact=True)
    log.check_position(ids[49], num_read=50)
    with pytest.raises(LogTruncated):
        log.check_position(ids[48], num_read=49)


def test_a_log_that_lost_everything_is_refused(broker: Broker, log: EventLog) -> None:
    ids = log.append(numbered(10))
    with redis.Redis.from_url(broker.url) as operator:
        operator.delete(log.key)
    with pytest.raises(LogTruncated, match=r"it ends at 0-0 after 0 entries, before that position"):
        log.read(ids[4])


def test_a_log_that_was_emptied_and_filled_again_is_refused(broker: Broker, log: EventLog) -> None:
    position = log.append(numbered(10))[4]
    with redis.Redis.from_url(broker.url) as operator:
        operator.delete(log.key)
    log.append(numbered(10))
    with pytest.raises(LogTruncated):
        log.read(position)


def test_a_dead_letter_keeps_the_entry_and_the_reason(broker: Broker, log: EventLog) -> None:
    log.dead_letter("7-1", {b"json": b"{", b"big": b"x" * MIB}, "bad_json", "line 1: \ud800")
    with redis.Redis.from_url(broker.url) as operator:
        ((_, letter),) = operator.xrange(log.dead_key)
    assert (letter[b"entry_id"], letter[b"code"], letter[b"detail"]) == (b"7-1", b"bad_json", b"line 1: ?")
    assert letter[b"original:json"] == b"{"
    assert letter[b"cut"] == b"1" and sum(map(len, letter.values())) < 70_000
    assert log.length() == 0


def test_a_full_broker_refuses_writes_and_serves_reads_and_trims(tmp_path: Path) -> None:
    with Broker(tmp_path / "f", tmp_path / "s", max_memory_bytes=8 * MIB) as broker, EventLog(broker.url, "k") as log:
        with pytest.raises(LogFull, match="refuses writes: "):
            log.append(numbered(100, size=MIB // 4))
        log.ping()
        entries = log.read("0-0")
        assert 0 < len(entries) < 100
        log.trim_before(entries[-1][0], exact=True)
        assert log.append(numbered(1))


def test_a_broker_that_hangs_costs_one_time_out(broker: Broker) -> None:
    async def append_all() -> list[object]:
        writer = AsyncEventLog(broker.url, "hung", timeout_s=0.3)
        await writer.append(numbered(1))
        with frozen(broker):
            failed = await asyncio.gather(*(writer.append(numbered(1)) for _ in range(600)), return_exceptions=True)
        ids: list[object] = [*await writer.append(numbered(1))]
        await writer.close()
        return [*failed, *ids]

    begin_s = time.monotonic()
    *failed, last = asyncio.run(append_all())
    assert time.monotonic() - begin_s < 1.5
    assert all(isinstance(error, LogUnavailable) for error in failed)
    assert isinstance(last, str)
    with EventLog(broker.url, "hung", timeout_s=0.3) as log, frozen(broker), pytest.raises(LogUnavailable):
        log.read("0-0")


def test_concurrent_appends_land_in_order_in_few_round_trips(broker: Broker, log: EventLog) -> None:
    async def append_all() -> tuple[list[list[str]], int]:
        writer = AsyncEventLog(broker.url, log.key)
        ids = await asyncio.gather(*(writer.append([entry]) for entry in numbered(500)))
        await writer.close()
        return ids, writer.num_round_trips

    ids, num_round_trips = asyncio.run(append_all())
    assert [entry for _, entry in log.read("0-0")] == numbered(500)
    assert [entry_id for entry_id, _ in log.read("0-0")] == [one for (one,) in ids]
    assert num_round_trips <= 3


def test_each_caller_of_a_group_gets_its_own_answer(tmp_path: Path) -> None:
    async def append_all(url: str) -> list[list[str] | BaseException]:
        writer = AsyncEventLog(url, "k", max_waiting_bytes=64 * MIB)
        sizes = [1, *[MIB] * 15]
        answers = await asyncio.gather(*(writer.append(numbered(1, size)) for size in sizes), return_exceptions=True)
        await writer.close()
        return answers

    with Broker(tmp_path / "f", tmp_path / "s", max_memory_bytes=8 * MIB) as broker:
        answers = asyncio.run(append_all(broker.url))
        with EventLog(broker.url, "k") as log:
            written = [entry_id for entry_id, _ in log.read("0-0")]
    assert [answer[0] for answer in answers if isinstance(answer, list)] == written
    assert isinstance(answers[0], list) and isinstance(answers[-1], LogFull)


def test_an_append_beyond_the_queue_is_refused_at_once(broker: Broker, log: EventLog) -> None:
    async def append_all() -> list[list[str] | BaseException]:
        writer = AsyncEventLog(broker.url, log.key, max_waiting_bytes=1000)
        appends = [writer.append(numbered(1, size=400)) for _ in range(4)]
        answers = await asyncio.gather(*appends, return_exceptions=True)
        answers.append(await writer.append(numbered(1, size=400)))
        await writer.close()
        return answers

    answers = asyncio.run(append_all())
    assert [type(answer) for answer in answers] == [list, list, LogOverloaded, LogOverloaded, list]
    assert log.length() == 3


def test_a_cancelled_caller_that_still_waited_wrote_nothing(broker: Broker, log: EventLog) -> None:
    async def append_and_cancel() -> None:
        writer = AsyncEventLog(broker.url, log.key)
        first = asyncio.create_task(writer.append(numbered(1)))
        second = asyncio.create_task(writer.append(numbered(1)))
        third = asyncio.create_task(writer.append(numbered(1)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, third)
        await writer.close()

    asyncio.run(append_and_cancel())
    assert log.length() == 2


def test_both_clients_come_back_after_the_broker_does(tmp_path: Path) -> None:
    async def append(writer: AsyncEventLog) -> list[str]:
        return await writer.append(numbered(1))

    with Broker(tmp_path / "f", tmp_path / "s") as broker, EventLog(broker.url, "k") as log, asyncio.Runner() as loop:
        writer = AsyncEventLog(broker.url, "k")
        ids = loop.run(append(writer))
        broker.stop()
        with pytest.raises(LogUnavailable, match="no answer from the broker at"):
            loop.run(append(writer))
        with pytest.raises(LogUnavailable):
            log.read("0-0")
        broker.start()
        ids += loop.run(append(writer))
        assert [entry_id for entry_id, _ in log.read("0-0")] == ids
        loop.run(writer.close())


def test_a_password_in_the_url_stays_out_of_the_message() -> None:
    with EventLog("redis://user:secret@127.0.0.1:1/0", "k") as log, pytest.raises(LogUnavailable) as caught:
        log.ping()
    assert "127.0.0.1:1" in str(caught.value) and "secret" not in str(caught.value)


def test_after_a_gap_nothing_is_read_twice_and_nothing_new_is_left_out(broker: Broker, log: EventLog) -> None:
    ids = log.append([{b"json": b"1"}, {b"json": b"2"}, {b"json": b"3"}])
    assert log.skip_gap("0-0") == (before(ids[0]), 0)
    lost_end = f"{int(ids[-1].split('-')[0]) + 5}-0"  # a position that the log, having lost its end, never came to
    assert log.skip_gap(lost_end) == (ids[-1], 3)
    log.trim_before(ids[2], exact=True)
    assert log.skip_gap(ids[0]) == (before(ids[2]), 2)


def before(entry_id: str) -> str:
    milliseconds, sequence = map(int, entry_id.split("-"))
    return f"{milliseconds}-{sequence - 1}" if sequence else f"{milliseconds - 1}-{2**64 - 1}"
