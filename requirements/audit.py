"""Asks the Python advisory database (through pip-audit) about every pinned package; part of `make check`.

Exit status: 0 nothing known, or nobody to ask, which is said; 1 a known vulnerability in a pinned version.
"""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = ("cpu.txt", "dev.txt")
TIMEOUT_S = 180


def main() -> int:
    """Ask, and say what came of it."""
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner=off", "-f", "json"]
    for lock in LOCKS:
        command += ["-r", str(HERE / lock)]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # noqa: S603
        packages = json.loads(asked.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError):
        sys.stdout.write("advisories: NOT CHECKED, the advisory service cannot be reached\n")
        return 0
    bad = [(one, vulnerability) for one in packages for vulnerability in one.get("vulns", [])]
    for one, vulnerability in bad:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        sys.stdout.write(f"{one['name']} {one['version']}: {vulnerability['id']}, fixed in {fixed}\n")
    unknown = sum("skip_reason" in one for one in packages)
    said = f"advisories: {len(packages) - unknown} pinned packages asked about, {len(bad)} vulnerabilities"
    sys.stdout.write(f"{said}{f'; {unknown} are NOT CHECKED, the service does not know them' if unknown else ''}\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
