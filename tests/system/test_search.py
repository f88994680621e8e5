"""Searches of a whole system whose trainer, a process of its own, learns meanwhile."""

import threading

import numpy as np

from tests.system.running import Running, system, wait_until
from trainer.hashing import hash_values

VIDEOS = list(range(1, 121))
BY_KEY = dict(zip(map(str, hash_values(VIDEOS).tolist()), VIDEOS, strict=True))
TABLE = "/v1/tables/video/embeddings"


def learn_until(running: Running, stop: threading.Event, sent: list[int]) -> None:
    """One batch after the other."""
    turn = 0
    while not stop.is_set():
        turn += 1
        sent[0] += len(VIDEOS)
        events = [{"features": {"user_id": v % 7, "video_id": v}, "label": (v + turn) % 2} for v in VIDEOS]
        assert running.post("/v1/events", events)[0] == 202


def test_while_the_trainer_learns_a_search_names_ids_that_are_there_and_afterwards_all_of_them_rightly() -> None:
    with system() as running:
        running.post("/v1/events", [{"features": {"user_id": 1, "video_id": v}, "label": 1} for v in VIDEOS])
        wait_until(lambda: running.step() >= len(VIDEOS), timeout_s=30, why="the videos are learned")
        stop, sent = threading.Event(), [len(VIDEOS)]
        learning = threading.Thread(target=learn_until, args=(running, stop, sent))
        learning.start()
        version, versions = 0, set()
        try:
            for k in range(300):
                status, answer = running.post(f"{TABLE}:search", {"id": VIDEOS[k % len(VIDEOS)], "k": 20})
                assert status == 200, answer
                found = [BY_KEY[key] for key in answer["keys"]]
                assert len(set(found)) == 20
                assert VIDEOS[k % len(VIDEOS)] not in found
                assert int(answer["model"]["version"]) >= version
                version = int(answer["model"]["version"])
                versions.add(version)
        finally:
            stop.set()
            learning.join()
        assert len(versions) > 20
        wait_until(lambda: running.step() >= sent[0], timeout_s=30, why="all is learned")
        settled = np.array(running.post(f"{TABLE}:lookup", {"ids": VIDEOS})[1]["vectors"])
        similarity = settled @ settled[0] / np.linalg.norm(settled, axis=1) / np.linalg.norm(settled[0])
        _, answer = running.post(f"{TABLE}:search", {"id": VIDEOS[0], "k": 119})
        expected = [similarity[VIDEOS.index(BY_KEY[key])] for key in answer["keys"]]
        np.testing.assert_allclose(answer["similarities"], expected, atol=1e-5)
        assert len(answer["keys"]) == 119
