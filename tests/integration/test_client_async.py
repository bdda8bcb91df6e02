"""The asyncio client, under uvloop and the standard loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvloop

from engine_core.client import AsyncEngineClient
from engine_core.errors import EngineDeadError, EngineStartError, RequestError, UtilityError
from executor.sampling_params import SamplingParams
from tests.engines import children_of, expected, is_running, mock_config, prompt, wait_until

LONG = SamplingParams(max_tokens=4000)


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    """Runs a coroutine in a loop of its own."""

    def run(main: Any) -> None:
        if request.param == "uvloop":
            if sys.version_info >= (3, 11):
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(main)
            else:
                uvloop.install()
                asyncio.run(main)
        else:
            asyncio.run(main)

    return run


async def collect(outputs: AsyncIterator[Any]) -> list[int]:
    return [token async for output in outputs for token in output.new_token_ids]


def test_many_streams_at_once(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config()) as client:
            prompts = [prompt(seed, 5 + seed) for seed in range(100)]
            results = await asyncio.gather(
                *(
                    collect(client.generate(p, SamplingParams(max_tokens=10 + i)))
                    for i, p in enumerate(prompts)
                )
            )
            assert results == [expected(p, 10 + i) for i, p in enumerate(prompts)]
            assert client.num_live == 0

    run(main())


def test_batches_without_streams(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config()) as client:
            assert await client.outputs() == []
            sent = {client.add_request(prompt(i, 20), SamplingParams(max_tokens=30)): i for i in range(50)}
            tokens: dict[str, list[int]] = {request_id: [] for request_id in sent}
            while client.num_live:
                for output in await client.outputs():
                    tokens[output.request_id] += output.new_token_ids
            assert all(tokens[request_id] == expected(prompt(i, 20), 30) for request_id, i in sent.items())

    run(main())


def test_cancelling_a_consumer_aborts_its_request(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config(step_ms=1)) as client:
            begun = asyncio.Event()

            async def consume() -> None:
                async for _ in client.generate(prompt(1, 10), LONG):
                    begun.set()

            task = asyncio.ensure_future(consume())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert client.num_live == 0
            assert await client.utility("reset_prefix_cache") is True

            async for _ in client.generate(prompt(1, 10), LONG):
                break  # the generator is finalised by the loop
            while client.num_live:
                await asyncio.sleep(0.01)
            assert await client.utility("reset_prefix_cache") is True

    run(main())


def test_abort_ends_a_stream_with_its_reason(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config(step_ms=1)) as client:
            reasons = []
            async for output in client.generate(prompt(1, 10), LONG, request_id="mine"):
                reasons.append(output.finish_reason)
                if len(reasons) == 5:
                    await client.abort("mine")
                    assert await client.utility("reset_prefix_cache") is True
            assert reasons[-1] == "abort" and set(reasons[:-1]) == {None}

    run(main())


def test_refusals_and_failed_calls_raise(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config()) as client:
            with pytest.raises(RequestError, match="empty"):
                await collect(client.generate([]))
            with pytest.raises(UtilityError, match="nonsense"):
                await client.utility("nonsense")
            assert await client.collective_rpc("check_health") == [None]

    run(main())


def test_call_that_takes_too_long_times_out(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config(step_ms=5)) as client:
            consumer = asyncio.ensure_future(
                collect(client.generate(prompt(1, 10), SamplingParams(max_tokens=60)))
            )
            await asyncio.sleep(0.1)
            with pytest.raises(TimeoutError, match="pause_generation"):
                await client.utility("pause_generation", "wait", timeout_s=0.01)
            assert await consumer == expected(prompt(1, 10), 60)
            assert await client.utility("is_scheduler_paused") is True

    run(main())


def test_engine_death_reaches_every_waiter(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        async with AsyncEngineClient.launch(mock_config(step_ms=1)) as client:
            client.add_request(prompt(1, 10), LONG)
            await client.outputs()

            async def drain() -> None:
                while True:
                    await client.outputs()

            waiting = [
                asyncio.ensure_future(coroutine)
                for coroutine in (
                    collect(client.generate(prompt(2, 10), LONG)),
                    drain(),
                    client.utility("pause_scheduler", "wait"),
                )
            ]
            await asyncio.sleep(0.2)
            os.kill(client.engine_pid, signal.SIGKILL)
            done, pending = await asyncio.wait(waiting, timeout=5)
            assert not pending
            for task in done:
                error = task.exception()
                assert isinstance(error, EngineDeadError) and "SIGKILL" in error.cause
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                await client.utility("is_sleeping")
            with pytest.raises(EngineDeadError, match="SIGKILL"):
                client.add_request([1])

    run(main())


def test_closing_ends_those_who_wait(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        client = await AsyncEngineClient.launch(mock_config(step_ms=1))
        consumer = asyncio.ensure_future(collect(client.generate(prompt(2, 10), LONG)))
        await asyncio.sleep(0.1)
        pid = client.engine_pid
        await client.close()
        await client.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await consumer
        assert not is_running(pid)

    run(main())


def test_cancelled_launch_leaves_no_engine(run: Callable[[Any], None]) -> None:
    before = set(children_of(os.getpid()))

    async def main() -> None:
        config = mock_config(worker_cls="tests.slow_start_worker:SlowStartWorker")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(_open(config)), 0.7)

    async def _open(config: Any) -> AsyncEngineClient:
        return await AsyncEngineClient.launch(config)

    run(main())
    wait_until(lambda: not set(children_of(os.getpid())) - before, "the engine's end")


def test_joining_a_running_engine(run: Callable[[Any], None]) -> None:
    async def main() -> None:
        address = f"ipc://@engine-core-test-async-{os.getpid()}"
        with pytest.raises(EngineStartError, match="no engine at"):
            await AsyncEngineClient.connect(address)
        async with (
            AsyncEngineClient.launch(mock_config(), lobby=address) as first,
            AsyncEngineClient.connect(address) as second,
        ):
            assert second.info.instance_id == first.info.instance_id
            results = await asyncio.gather(
                *(collect(c.generate(prompt(1, 9), SamplingParams(max_tokens=20))) for c in (first, second))
            )
            assert results == [expected(prompt(1, 9), 20)] * 2

    run(main())
