"""Servers that others trust, with the same frozen model behind them: each file runs as a process."""
