"""`python -m engine_core.chaos.bystander ADDRESS SEED`: one more client, to be stopped or killed.

It checks its tokens like anybody else. Exit status: 0 when the engine has ended, 3 for a wrong token or end.
"""

from __future__ import annotations

import asyncio
import random
import sys

from engine_core.async_client import AsyncEngineClient
from engine_core.chaos.traffic import Traffic, generated
from engine_core.errors import EngineDeadError

CONCURRENCY = 8
LOGPROBS = 100  # so that its death finds the engine in the middle of a message
WRONG = 3


async def serve(address: str, seed: int) -> int:
    async with AsyncEngineClient.connect(address) as client:
        vocab_size = client.info.vocab_size or 0
        source = generated(random.Random(seed), vocab_size)
        traffic = Traffic(client, source, CONCURRENCY, vocab_size, logprobs=LOGPROBS)
        traffic.start()
        print("running", flush=True)
        while traffic.error is None and not traffic.tally.complaints:
            await asyncio.sleep(0.05)
    complaints = traffic.tally.complaints
    if isinstance(traffic.error, EngineDeadError):
        complaints = [text for text in complaints if "the engine died" not in text]
    if complaints:
        print(complaints[0], file=sys.stderr)
        return WRONG
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(sys.argv[1], int(sys.argv[2]))))
