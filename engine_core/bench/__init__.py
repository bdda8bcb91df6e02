"""Measurements of the runtime on the machine at hand, for `engine-core bench`."""
