"""The scheduling laboratory: the real scheduler in virtual time; its decisions recorded and replayed."""
