"""Tests of Livebed, by kind: unit, contract, system; and benchmarks."""
