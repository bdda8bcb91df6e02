"""Serves real traffic while it breaks things, and checks that the promises of docs/failures.md hold."""
