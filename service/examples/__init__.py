"""Real click logs that come with the package, each with its credit and its configuration."""

from pathlib import Path

KUAIRAND = Path(__file__).parent / "kuairand"
