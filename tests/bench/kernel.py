"""How near the event engine's kernel is to the arithmetic and to the memory of the core that it runs on.

    python -m tests.bench.kernel [--json] [--quick]

The kernel learns 8 features x 16 with an MLP 64-32 and a cross layer of rank 8, event by event. Beside it, on the same
core and in turns, the simplest loops that do what it is made of and nothing else:

    multiply-adds     dependent ones, in as many chains as the compiler interleaves, on floats that stay in the first
                      cache: the arithmetic
    dot               one long inner product in the first cache: the arithmetic, with every operand loaded
    sweep             `dense_step_through` over all dense weights in a few long rows: the update without the net
    rows, one by one  a row update at random slots of a large table: the memory, waited for
    rows, asked for   the same, each row asked for some updates before its turn: the memory, in flight

Figures are the best of many short turns: what else runs on the machine only ever adds. A multiply-add is one
multiplication and one addition. An event's forward pass has one a dense weight; its backward pass sweeps the weights
that it updates (counted, event by event: a unit that the ReLU silenced keeps its own).
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.harness import arguments, emit, goal
from trainer.dense import LearnerState
from trainer.engine_event import EventEngine
from trainer.events import Features
from trainer.forward import dot
from trainer.kernel import kernel_fast
from trainer.live_atomics import address_of, prefetch
from trainer.optim import ADAGRAD, dense_step_through, row_step
from trainer.schema import Schema
from trainer.settings import Settings
from trainer.tables import Tables

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

NUM_FEATURES, WIDTH = 8, 16
NUM_ROWS = 1_000_000  # of the table that rows are updated in at random: 64 MB, more than a core's own caches hold
AHEAD = 8  # updates between asking for a row and updating it, as many as one event has
COUNTED = 500  # events whose updated weights are counted
SCALE, RATE, EPS = np.float32(1e-3), np.float32(0.01), np.float32(1e-8)
LONG = 2048  # floats that stay in the first cache
TIMES = 50  # in a turn, so that it counts little that other loops emptied the caches
CHAIN = 64  # multiply-adds after each other on one float


def settings() -> Settings:
    """The configuration that the issue of a fast step speaks of."""
    names = [f"f{i}" for i in range(NUM_FEATURES)]
    return Settings.model_validate(
        {
            "tables": {name: {"width": WIDTH, "capacity": 4096} for name in names},
            "features": {name: {"kind": "categorical"} for name in names},
            "model": {"hidden": [64, 32], "cross_layers": 1, "cross_rank": 8},
        }
    )


@kernel_fast
def chains(x: Float32s) -> None:
    """CHAIN multiply-adds on every float."""
    for k in range(x.shape[0]):
        value = x[k]
        for _ in range(CHAIN):
            value = value * np.float32(0.999) + np.float32(0.001)
        x[k] = value


@kernel_fast
def dots(a: Float32s, b: Float32s, times: int) -> np.float32:
    """The same inner product, as often as said."""
    total = np.float32(0)
    for _ in range(times):
        a[0] = total
        total += dot(a, b)
    return total


@kernel_fast
def sweep(weights: Float32s, state: Float32s, x: Float32s, dx: Float32s, times: int) -> None:
    """Pass back through all weights and update them, in rows as long as x, as often as said."""
    n = x.shape[0]
    num_rows = weights.shape[0] // n
    for row in range(times * num_rows):
        at = row % num_rows * n
        dense_step_through(ADAGRAD, weights[at : at + n], state[at : at + n], SCALE, x, dx, RATE, EPS)


@kernel_fast
def update_at(rows: Float32s, accumulators: Float32s, slots_N: Int64s, gradient: Float32s, ahead: int) -> None:
    """Row-wise Adagrad at slot after slot; the row `ahead` places on is asked for (0: none is)."""
    width = gradient.shape[0]
    for i in range(slots_N.shape[0] - ahead):
        if ahead > 0:
            prefetch(address_of(rows) + 4 * width * slots_N[i + ahead])
            prefetch(address_of(accumulators) + 4 * slots_N[i + ahead])
        start = slots_N[i] * width
        row_step(rows[start : start + width], accumulators, slots_N[i], gradient, RATE, EPS)


class Kernel:
    """A new engine, and events for it to learn."""

    def __init__(self, num_events: int) -> None:
        configuration = settings()
        schema = Schema.from_settings(configuration)
        self.tables = Tables(schema, configuration.model)
        self.state = LearnerState.initial(schema, configuration.model)
        self.engine = EventEngine(schema, configuration.model, self.tables, self.state)
        random = np.random.default_rng(0)
        ids_BC = (1 + random.zipf(1.3, (num_events, NUM_FEATURES)) % 3000).astype(np.int64)
        ones_BF = np.ones((num_events, NUM_FEATURES), np.int32)
        floats_BM = np.empty((num_events, 0), np.float32)
        self.features = Features(ids_BC, ones_BF, floats_BM, np.ones((num_events, NUM_FEATURES), np.uint8))
        self.slots_BC = self.tables.assign(self.features, None, 1).slots_BC
        self.labels_B = (random.random(num_events) < 0.2 + 0.4 * (ids_BC[:, 0] % 2)).astype(np.float32)

    def learn(self) -> None:
        """All events, one by one."""
        self.engine.learn(self.slots_BC, self.features, self.labels_B)

    def predict(self) -> None:
        """All events."""
        self.engine.predict(self.slots_BC, self.features)

    def updated_weights(self) -> float:
        """Dense weights that an event updates, on average: those whose accumulator it moves."""
        total = 0
        for b in range(COUNTED):
            before = self.state.accumulators.copy()
            self.engine.learn(self.slots_BC[b : b + 1], self.features.rows(b, b + 1), self.labels_B[b : b + 1])
            total += int((self.state.accumulators != before).sum())
        return total / COUNTED


def best_ns(call: Callable[[], object], count: int) -> Callable[[], float]:
    """A turn of a call: ns for each of the `count` things that it does."""

    def turn() -> float:
        started = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - started) / count

    return turn


def measure(num_events: int, turns: int) -> dict[str, Any]:
    """All loops in turns."""
    kernel = Kernel(num_events)
    updated = kernel.updated_weights()
    random = np.random.default_rng(1)
    num_weights = len(kernel.state.params)
    few, a, b, x, dx = (np.ones(LONG, np.float32) for _ in range(5))
    weights, state = np.ones(num_weights, np.float32), np.ones(num_weights, np.float32)
    rows, accumulators = np.ones(NUM_ROWS * WIDTH, np.float32), np.ones(NUM_ROWS, np.float32)
    gradient = np.full(WIDTH, 1e-3, np.float32)
    slots = random.integers(0, NUM_ROWS, (turns, 4096))
    turn = -1

    def update(ahead: int) -> Callable[[], None]:
        return lambda: update_at(rows, accumulators, slots[turn], gradient, ahead)

    loops = {
        "learn": best_ns(kernel.learn, num_events),
        "predict": best_ns(kernel.predict, num_events),
        "multiply_add": best_ns(lambda: chains(few), len(few) * CHAIN),
        "dot": best_ns(lambda: dots(a, b, TIMES), len(a) * TIMES),
        "sweep": best_ns(lambda: sweep(weights, state, x, dx, TIMES), num_weights // LONG * LONG * TIMES),
        "row": best_ns(update(0), 4096),
        "row_asked_for": best_ns(update(AHEAD), 4096 - AHEAD),
    }
    best = dict.fromkeys(loops, np.inf)
    for turn in range(turns):  # noqa: B007 -- `update` reads it
        for name, loop in loops.items():
            best[name] = min(best[name], loop())
    backward = best["learn"] - best["predict"]
    return {
        "ns": best,
        "dense_weights": num_weights,
        "updated_weights": updated,
        "forward_over_multiply_adds": num_weights * best["multiply_add"] / best["predict"],
        "forward_over_dot": num_weights * best["dot"] / best["predict"],
        "backward_over_sweep": updated * best["sweep"] / (backward - NUM_FEATURES * best["row_asked_for"]),
        "memory_waited_for": NUM_FEATURES * best["row"] / best["learn"],
        "memory_asked_for": NUM_FEATURES * best["row_asked_for"] / best["learn"],
    }


def main() -> None:
    """Measure and print."""
    options = arguments(__doc__ or "").parse_args()
    results = measure(*((1000, 30) if options.quick else (2000, 200)))
    goals = [
        goal("an event learned, 8 features x 16", results["ns"]["learn"] / 1000, "us"),
        goal(
            "forward pass, of the arithmetic with operands in registers",
            100 * results["forward_over_multiply_adds"],
            "%",
        ),
        goal("forward pass, of a long dot product in cache", 100 * results["forward_over_dot"], "%"),
        goal("backward pass and update, of one sweep over the weights", 100 * results["backward_over_sweep"], "%"),
        goal(
            "memory, if each of an event's rows were waited for, of its time", 100 * results["memory_waited_for"], "%"
        ),
        goal("memory, with rows asked for ahead, of its time", 100 * results["memory_asked_for"], "%"),
    ]
    emit("kernel", results, goals, options.json)


if __name__ == "__main__":
    main()
