"""The clients of an engine.

`EngineClient` (blocking) and `AsyncEngineClient` launch an engine process or join a running one;
`InprocClient` holds the engine itself.
"""

from engine_core.async_client import AsyncEngineClient
from engine_core.blocking_client import EngineClient
from engine_core.client_session import RequestOutput
from engine_core.inproc_client import InprocClient

__all__ = ["AsyncEngineClient", "EngineClient", "InprocClient", "RequestOutput"]
