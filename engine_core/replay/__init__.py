"""Replay of recorded traffic against an engine: traces, their prompts, the run and its report."""
