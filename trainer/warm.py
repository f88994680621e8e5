"""`python -m trainer.warm`: compile every kernel into the cache on disk, so that no first request waits for it."""

import importlib
import shutil
import sys
import time

from trainer.kernel import CACHE

MODULES = (
    "hashing", "events", "live", "live_scan", "tables", "entities", "publish", "guard", "dedup", "engine_event",
    "scorer",
)  # fmt: skip


def warm(name: str) -> float:
    """Compile one module's kernels, or load them from the cache; returns the seconds it took."""
    begun = time.perf_counter()
    importlib.import_module(f"trainer.{name}").warm()
    return time.perf_counter() - begun


def main() -> None:
    """Compile module by module, saying what is done and how long it took."""
    for old in CACHE.parent.glob("kernels-*"):
        if old != CACHE:
            shutil.rmtree(old, ignore_errors=True)
    total_s = 0.0
    for name in MODULES:
        sys.stdout.write(f"compiling the kernels of trainer.{name} ... ")
        sys.stdout.flush()
        total_s += (took_s := warm(name))
        sys.stdout.write(f"{took_s:.1f} s\n")
    sys.stdout.write(f"all kernels are compiled ({total_s:.0f} s; later starts load them)\n")


if __name__ == "__main__":
    main()
