"""What can go wrong between a client and an engine, as exceptions with fields."""

from __future__ import annotations


class EngineCoreError(Exception):
    """Base of the errors of this package."""


class ProtocolError(EngineCoreError):
    """A peer sent bytes that are not the protocol. The text says which field and what was found there."""


class HandshakeError(EngineCoreError):
    """The front end could not be joined: it did not answer in time, or answered something else."""


class EngineDeadError(EngineCoreError):
    """The engine is gone. `cause` is the first error it reported, or how its process ended."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the engine is dead: {cause}")
        self.cause = cause


class EngineStartError(EngineDeadError):
    """The engine did not become ready. `cause` is the first error, with the process, phase or field in it."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.args = (f"the engine did not start: {cause}",)


class EngineUnreachableError(EngineStartError):
    """No engine could be joined at an address. `cause` says where and why."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.args = (cause,)


class RequestError(EngineCoreError):
    """One request failed; the engine serves on.

    `code` is a word for programs ("validation_error", "engine_paused", "queue_full", "internal_error", ...);
    `retryable` says whether the same request may succeed later.
    """

    def __init__(
        self, code: str, message: str, retryable: bool = False, request_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.request_id = request_id


class UtilityError(EngineCoreError):
    """A utility call failed in the engine. `message` is the engine's."""

    def __init__(self, method: str, message: str) -> None:
        super().__init__(message)
        self.method = method
        self.message = message
