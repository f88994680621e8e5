"""A million bad inputs through every parser: none may end in an error of ours, and no number that is not finite pass.

    python -m tests.bench.fuzz --inputs 1000000 --json

The same makers as in `tests/contract/test_fuzz.py` (which sends fewer, some of them over real sockets), with other
seeds, on every core. About 0.5 ms an input and core.
"""

import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.bench.harness import arguments, emit, goal
from tests.fuzzing import Parsers
from tests.unit.worlds import every_kind

SHARE = 5000  # inputs of one seed
QUICK_INPUTS = 50_000


def share(seed: int) -> tuple[Counter[str], str | None]:
    """What became of one seed's inputs, and the first failure."""
    settings, schema = every_kind()
    parsers = Parsers(schema, settings.serving.limits, seed)
    try:
        parsers.run(SHARE)
    except AssertionError as error:
        return parsers.outcomes, f"seed {seed}: {str(error)[:2000]}"
    return parsers.outcomes, None


def main() -> None:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1000, help="of the first share; each has one of its own")
    options = parser.parse_args()
    shares = -(-(QUICK_INPUTS if options.quick else options.inputs) // SHARE)
    outcomes, failures = Counter[str](), []
    started = time.perf_counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for counted, failure in pool.map(share, range(options.seed, options.seed + shares)):
            outcomes += counted
            failures += [failure] if failure else []
    results = {
        "seconds": time.perf_counter() - started,
        "inputs": outcomes.total(),
        "outcomes": dict(outcomes.most_common()),
        "failures": failures[:20],
    }
    goals = [
        goal("bad inputs tried", outcomes.total(), "", at_least=QUICK_INPUTS if options.quick else 1_000_000),
        goal("inputs that ended in an error of ours", len(failures), "", at_most=0),
    ]
    emit("fuzz", results, goals, options.json)


if __name__ == "__main__":
    main()
