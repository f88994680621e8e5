"""`python -m trainer.warm`: compile every kernel into the cache on disk, so that no first request waits for it."""

import importlib
import sys
import time

MODULES = ("hashing", "events", "live", "tables", "entities", "publish", "engine_event", "scorer")


def main() -> None:
    """Compile module by module, saying what is done and how long it took."""
    started = time.perf_counter()
    for name in MODULES:
        sys.stdout.write(f"compiling the kernels of trainer.{name} ... ")
        sys.stdout.flush()
        begun = time.perf_counter()
        importlib.import_module(f"trainer.{name}").warm()
        sys.stdout.write(f"{time.perf_counter() - begun:.1f} s\n")
    sys.stdout.write(f"all kernels are compiled ({time.perf_counter() - started:.0f} s; later starts load them)\n")


if __name__ == "__main__":
    main()
