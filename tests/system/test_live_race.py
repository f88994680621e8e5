"""Readers of the live store against a writer that evicts, and against one that is killed, in processes of their own."""

import time
from pathlib import Path

import numpy as np

from tests.system.live_race import Seen, race, start_writer, watch
from trainer.live import Reader

FAULTS = ("torn_rows", "foreign_rows", "mixed_dense", "versions_back")


def assert_no_fault(seen: Seen) -> None:
    assert {name: getattr(seen, name) for name in FAULTS} == dict.fromkeys(FAULTS, 0)


def wait_for_generation_after(reader: Reader, generation: int) -> None:
    until = time.monotonic() + 60
    while reader.state().generation == generation:
        assert time.monotonic() < until, "the reader did not move to the next generation"
        reader.refresh()


def test_readers_see_no_torn_foreign_or_mixed_values_while_a_writer_evicts(tmp_path: Path) -> None:
    seen = race(tmp_path, capacity=64, seconds=3)
    assert seen.reads > 100_000
    assert seen.versions > 10
    assert_no_fault(seen)


def test_reads_go_on_after_the_writer_is_killed_and_move_to_the_next_one(tmp_path: Path) -> None:
    capacity, reader = 512, Reader(tmp_path)
    writer = start_writer(tmp_path, capacity)
    for life in range(3):
        reader.attach(60)
        generation = reader.state().generation
        assert_no_fault(watch(reader, capacity, life, seconds=0.1 + 0.07 * life))
        writer.kill()  # SIGKILL, wherever it is
        writer.join()
        version, (rows_NW, _) = reader.state().version, reader.gather("rows", np.arange(capacity))
        orphaned = watch(reader, capacity, life, seconds=0.2)
        assert orphaned.reads > 1000
        assert_no_fault(orphaned)
        assert reader.state().version == version
        assert (reader.gather("rows", np.arange(capacity))[0] == rows_NW).all()
        writer = start_writer(tmp_path, capacity, seed=life + 1)
        wait_for_generation_after(reader, generation)
        assert reader.state().version > version
    writer.kill()
    writer.join()
