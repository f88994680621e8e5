"""`make bench`: run every benchmark in turn, print the table of their goals, and put it into the README."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.harness import arguments

BENCHES = ("events", "store", "evaluate", "kernel", "training", "recovery", "freshness", "serving --peers", "demo")
README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- make bench writes this table -->", "<!-- end of the table -->"
LIMIT_S = 900.0


def run(name: str, quick: bool) -> dict[str, Any]:
    """Run one benchmark in a process of its own; its last line is its result."""
    module, *flags = name.split()
    command = [sys.executable, "-m", f"tests.bench.{module}", *flags, "--json", *(["--quick"] if quick else [])]
    print(f"running {' '.join(command[1:])}", file=sys.stderr, flush=True)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=LIMIT_S)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The goals of all benchmarks as a Markdown table."""
    lines = ["| benchmark | figure | measured | goal | |", "| --- | --- | --- | --- | --- |"]
    for result in results:
        for one in result["goals"]:
            verdict = ("reached" if one["ok"] else "missed") if one["goal"] else ""
            figure = f"{one['value']:.4g} {one['unit']}"
            lines.append(f"| `{result['bench']}` | {one['name']} | {figure} | {one['goal']} | {verdict} |")
    machine = results[0]["machine"]
    system = f"{machine['processor']}, {machine['system']}, Python {machine['python']}"
    return "\n".join([*lines, "", f"Measured on {machine['cores']} cores ({system})."])


def write(text: str) -> None:
    """Replace what stands between the README's two marks."""
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> None:
    """Run all, print the table, write it down."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=BENCHES, help="benchmarks to run (the README is then left alone)")
    options = parser.parse_args()
    results = [run(name, options.quick) for name in options.only]
    if options.json:
        print(json.dumps(results))
        return
    print(table(results))
    if tuple(options.only) == BENCHES:
        write(table(results))


if __name__ == "__main__":
    main()
