"""Tests: `unit` starts no process, `integration` does."""
