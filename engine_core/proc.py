"""The engine as a process: EngineCore with sockets, signals and a lobby around it.

One thread does the work: it takes in what clients sent, runs a step, and sends what the step yielded. ZMQ has
threads of its own for the actual I/O; Python threads for input and output would only add hand-overs under the
interpreter's lock between the socket and the step (docs/protocol.md has the measurement). The lobby's thread
sleeps unless a client comes or goes. An idle engine waits in one poll, a second at a time.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import secrets
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import zmq
from msgspec import to_builtins

from engine_core.clients import Clients
from engine_core.config import EngineConfig
from engine_core.core import EngineCore
from engine_core.dispatch import Dispatcher
from engine_core.front_end_link import FrontEndJoined, FrontEndLink
from engine_core.handshake import FrontEnd, FrontEndDialog, check_addresses
from engine_core.lab.recorder import DecisionRecorder, start_recorder
from engine_core.lobby import ClientJoined, ClientLeft, Event, Lobby, StopAsked
from engine_core.observation import Observation
from engine_core.protocol import EngineAddresses, ReadyResponse
from engine_core.sockets import Context, CoordinatorSockets
from engine_core.stopping import StopNow, StopSignals
from executor.base import EngineCapacity, make_executor
from executor.errors import ExecutorError
from transport.clock import SYSTEM_CLOCK, Clock

logger = logging.getLogger("engine_core")
AnyEvent = Event | FrontEndJoined | ExecutorError

COORDINATOR_TIMEOUT_S = 600.0  # until all engines of a deployment have come
LOOK_UP_S = 1.0  # an idle loop; a signal that comes just before a wait does not end it
TEARDOWN_GRACE_S = 5.0  # beyond what the workers are given
GC_THRESHOLD = 50_000  # new objects; a step leaves few that live, so rarely is often enough


@dataclass(frozen=True, slots=True)
class Serving:
    """What an engine that serves tells whoever runs it."""

    ready: ReadyResponse
    lobby: str | None


class Inbox:
    """Wakes the step loop from other threads and from signal handlers."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events: queue.SimpleQueue[AnyEvent] = queue.SimpleQueue()

    def put(self, event: AnyEvent) -> None:
        self._events.put(event)
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[AnyEvent]:
        os.eventfd_read(self.fd)
        events = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    def close(self) -> None:
        os.close(self.fd)


class EngineCoreProc:
    """The step loop and its clients. All of it belongs to the main thread."""

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        dispatcher: Dispatcher,
        inbox: Inbox,
        signals: StopSignals,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config
        self._core = core
        self._dispatcher = dispatcher
        self._inbox = inbox
        self._signals = signals
        self._clock = clock
        self._coordinator: CoordinatorSockets | None = None
        self._poller = zmq.Poller()
        self._poller.register(inbox.fd, zmq.POLLIN)
        self.clients = Clients(self._poller, dispatcher, clock)
        self._published_counts = (0, 0)
        self._workers_failed = False  # perhaps those before the last restart
        self._stop_reason: str | None = None
        self._drain_until = 0.0  # monotonic, once there is a reason to stop

    def set_coordinator(self, coordinator: CoordinatorSockets) -> None:
        self._coordinator = coordinator
        self._poller.register(coordinator.input, zmq.POLLIN)

    def run(self) -> str:
        """Serve until told to stop; returns why. Errors of the executor come out."""
        core, dispatcher, clients = self._core, self._dispatcher, self.clients
        while not self._is_done():
            can_step = core.has_work and not core.is_restarting
            self._receive(0 if can_step or clients.has_unread else self._longest_wait_ms())
            clients.dispatch()
            self._publish_counts()
            if self._workers_failed:
                self._workers_failed = False
                dispatcher.check_workers()
            if core.has_work and not core.is_restarting:
                dispatcher.step()
                self._publish_counts()
            elif core.next_deadline_s is not None:
                dispatcher.end_overdue()
            clients.send()
            if core.report is not None:
                core.report.delivered()
        dispatcher.control.abort_all()
        clients.send()
        clients.flush()
        return self._stop_reason or ""

    def take_aborts(self) -> list[str]:
        """Ids to abort, from messages that came while a step ran."""
        self._receive(0)
        return self.clients.aborted_ids()

    def close(self) -> None:
        self.clients.close()
        if self._coordinator is not None:
            self._coordinator.close()

    # Input

    def _receive(self, wait_ms: int) -> None:
        for source, _ in self._poll(wait_ms):
            if source == self._inbox.fd:
                self._take_events()
            elif not self.clients.take(source) and self._coordinator is not None:
                self._coordinator.discard_input()

    def _poll(self, wait_ms: int) -> list[tuple[Any, int]]:
        report = self._core.report
        if wait_ms == 0 or report is None:
            return self._poller.poll(wait_ms)
        report.going_idle()
        ready = self._poller.poll(wait_ms)
        report.awake()
        return ready

    def _take_events(self) -> None:
        events = self._inbox.take()
        if self._signals.signum is not None:
            self._begin_stop(signal.Signals(self._signals.signum).name)
        for event in events:
            if isinstance(event, ClientJoined):
                self.clients.add(event.client)
                logger.info("%s joined", event.client.name)
            elif isinstance(event, ClientLeft):
                self.clients.remove(event.client_index)
            elif isinstance(event, StopAsked):
                self._begin_stop(event.reason)
            elif isinstance(event, FrontEndJoined):
                self._replace_front_end(event)
            else:
                self._workers_failed = True  # not now: a step may be about to be taken in

    def _replace_front_end(self, joined: FrontEndJoined) -> None:
        for client in joined.clients:
            self.clients.remove(client.client_index)
            self.clients.add(client)
            logger.info("%s is back", client.name)
        if joined.coordinator is not None:
            if self._coordinator is not None:
                self._poller.unregister(self._coordinator.input)
                self._coordinator.close()
            self.set_coordinator(joined.coordinator)

    def _publish_counts(self) -> None:
        """The coordinator balances load by them."""
        if self._coordinator is None:
            return
        counts = self._dispatcher.counts()
        if counts != self._published_counts:
            self._published_counts = counts
            self._coordinator.output.send_multipart(self._dispatcher.encode_counts(), zmq.NOBLOCK)

    # Stopping

    def _begin_stop(self, reason: str) -> None:
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        self._dispatcher.closing = True
        limit_s = self._config.shutdown_timeout
        logger.info("stopping (%s), %s", reason, f"within {limit_s:g} s" if limit_s else "at once")
        self._drain_until = self._clock.monotonic() + limit_s
        if self._core.row is not None:
            self._core.row.phase = "draining"
        self._signals.force_after(limit_s + self._config.stop_grace_s + TEARDOWN_GRACE_S)

    def _longest_wait_ms(self) -> int:
        """How long to wait for messages when there is nothing to do: until it is time to end, for a request
        to end, or to look up.
        """
        until = [self._clock.monotonic() + LOOK_UP_S]
        if self._stop_reason is not None:
            until.append(self._drain_until)
        if (deadline_s := self._core.next_deadline_s) is not None:
            until.append(deadline_s)
        return max(0, int((min(until) - self._clock.monotonic()) * 1000) + 1)

    def _is_done(self) -> bool:
        """Whether to stop now: requests have ended, or their time is up."""
        if self._stop_reason is None:
            return False
        return not self._core.has_work or self._clock.monotonic() >= self._drain_until


def run_engine(
    config: EngineConfig,
    *,
    front_end: FrontEnd | None = None,
    lobby_address: str | None = None,
    launcher: socket.socket | None = None,
    on_serving: Callable[[Serving], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> int:
    """Run an engine in this process, in its main thread, until it is told to stop; returns the exit status.

    `front_end` is a vLLM front end to dial, `lobby_address` where clients of our own can join, `launcher` the
    stream to the process that started this one and with which it ends. `on_serving` is called once it serves.

    Raises whatever kept it from starting (`ConfigError`, `HandshakeError`, `LobbyError`, `ExecutorError`) and
    the first cause if it crashes. Clients have been told and the workers have been stopped by then.
    """
    signals = StopSignals()
    failure: Exception | None = None
    try:
        with ExitStack() as stack:
            signals.install()
            stack.callback(signals.restore)
            try:
                _run(stack, config, front_end, lobby_address, launcher, signals, on_serving, clock)
            except Exception as error:
                failure = error
                raise
    except StopNow:  # a signal cut the teardown short
        if failure is not None:
            raise failure from None
    return signals.exit_code(0)


def _run(
    stack: ExitStack,
    config: EngineConfig,
    front_end: FrontEnd | None,
    lobby_address: str | None,
    launcher: socket.socket | None,
    signals: StopSignals,
    on_serving: Callable[[Serving], None] | None,
    clock: Clock,
) -> None:
    inbox = Inbox()
    stack.callback(inbox.close)

    def on_event(event: Event) -> None:
        if isinstance(event, StopAsked) and not signals.serving:
            signals.interrupt()
        else:
            inbox.put(event)

    lobby = None
    if lobby_address is not None or launcher is not None:
        lobby = Lobby(lobby_address, launcher, on_event, clock)
    proc: EngineCoreProc | None = None
    observation: Observation | None = None
    last_word, crashed = "it was stopped", False
    try:
        config.validate()
        engine_index = front_end.engine_index if front_end is not None else 0
        observation = Observation(stack, config, engine_index, clock)
        proc = _start(stack, config, front_end, lobby, inbox, signals, clock, on_serving, observation)
        last_word = f"it was stopped: {proc.run()}"
    except StopNow as stop:
        last_word = str(stop)
    except BaseException as error:
        last_word, crashed = first_cause(error), True
        if observation is not None:
            observation.crashed(last_word)
        if proc is not None:
            proc.clients.announce_death()
        raise
    finally:
        # Clients hear first: stopping the workers may take a while.
        if lobby is not None:
            lobby.close(last_word, crashed=crashed)
        signals.force_after(config.stop_grace_s + TEARDOWN_GRACE_S)


def _start(
    stack: ExitStack,
    config: EngineConfig,
    front_end: FrontEnd | None,
    lobby: Lobby | None,
    inbox: Inbox,
    signals: StopSignals,
    clock: Clock,
    on_serving: Callable[[Serving], None] | None,
    observation: Observation,
) -> EngineCoreProc:
    """From nothing to an engine that serves."""
    context: Context = zmq.Context()
    stack.callback(context.destroy, linger=0)  # what is closed by then lingers as it was told
    dialog = None
    addresses = None
    if front_end is not None:
        if front_end.addresses is not None:
            check_addresses(addresses := front_end.addresses)
        else:
            dialog = stack.enter_context(FrontEndDialog(context, front_end))
            addresses = dialog.join().addresses

    engine_index = front_end.engine_index if front_end is not None else 0
    observation.row.phase = "starting workers"
    executor = make_executor(config.executor_config(), observation.page)
    stack.callback(executor.shutdown)

    def make_recorder(capacity: EngineCapacity) -> DecisionRecorder:
        recorder = start_recorder(config, capacity, engine_index, clock)
        stack.callback(recorder.close)
        return recorder

    core = EngineCore(
        config,
        executor,
        clock,
        take_aborts=lambda: proc.take_aborts(),
        track_finished=addresses is not None and addresses.coordinator_output is not None,
        on_restarted=inbox.wake,
        make_observer=make_recorder if config.record else None,
        row=observation.row,
        kv_events=observation.kv_events,
        collect_metrics=observation.monitoring is not None,
        trace=observation.tracer.ended if observation.tracer is not None else None,
    )
    observation.engine_made(core)
    observation.row.phase = "connecting"
    executor.set_failure_callback(inbox.put)
    dispatcher = Dispatcher(core, engine_index, clock)
    proc = EngineCoreProc(config, core, dispatcher, inbox, signals, clock)
    stack.callback(proc.close)

    registration = make_registration(config, core, front_end, addresses)
    num_clients = 0
    if front_end is not None and addresses is not None:
        link = FrontEndLink(
            context,
            front_end,
            addresses,
            register=lambda addresses: make_registration(config, core, front_end, addresses),
            on_joined=inbox.put,
        )
        stack.callback(link.close)
        proc.clients.set_front_end(link)
        clients = link.connect()
        for client in clients:
            proc.clients.add(client)
        num_clients = len(clients)
        if addresses.coordinator_input is not None and addresses.coordinator_output is not None:
            coordinator = CoordinatorSockets(
                context, addresses.coordinator_input, addresses.coordinator_output
            )
            proc.set_coordinator(coordinator)
            coordinator.wait_until_ready(COORDINATOR_TIMEOUT_S)
    if dialog is not None:
        dialog.announce_ready()
        dialog.close()

    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    signals.serve(inbox.wake, config.shutdown_timeout + config.stop_grace_s + TEARDOWN_GRACE_S)
    if lobby is not None:
        lobby.open(context, registration, first_client_index=num_clients)
        observation.row.address = lobby.address or ""
    observation.row.phase = "ready"
    if on_serving is not None:
        on_serving(Serving(registration, lobby.address if lobby is not None else None))
    return proc


def make_registration(
    config: EngineConfig, core: EngineCore, front_end: FrontEnd | None, addresses: EngineAddresses | None
) -> ReadyResponse:
    """What the engine turned out to be."""
    capacity = core.capacity
    kv_tokens = core.scheduler.kv.max_tokens
    max_loras = core.scheduler.limits.max_loras
    return ReadyResponse(
        max_model_len=capacity.max_model_len,
        num_gpu_blocks=capacity.num_gpu_blocks,
        block_size=config.block_size,
        dp_stats_address=addresses.frontend_stats_publish_address if addresses is not None else None,
        dtype=capacity.dtype,
        vllm_version=f"engine-core {version('engine-core')}",
        world_size=config.tensor_parallel_size,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_rank=front_end.engine_index if front_end is not None else 0,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        instance_id=secrets.token_hex(16),
        supports_lora=max_loras > 0,
        max_loras=max_loras,
        kv_cache_size_tokens=kv_tokens,
        kv_cache_max_concurrency=kv_tokens / capacity.max_model_len,
        effective_attention_block_size=config.block_size,
        coordinator_input_address=addresses.coordinator_input if addresses is not None else None,
        coordinator_output_address=addresses.coordinator_output if addresses is not None else None,
        vocab_size=capacity.vocab_size,
        worker_cls=config.worker_cls,
        enable_sleep_mode=config.enable_sleep_mode,
        kv_events_config=None if config.kv_events_config is None else to_builtins(config.kv_events_config),
    )


def first_cause(error: BaseException) -> str:
    """The error in words, with its evidence."""
    if isinstance(error, ExecutorError):
        return error.report()
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
