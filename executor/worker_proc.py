"""The process of one rank: `python -m executor.worker_proc RANK CONTROL DEATH PAGE STACK [COLLECTIVE..]`; all
but the rank are descriptors.

It takes its worker through the start phases and then serves what the executor broadcasts, until the queue is
closed. It never outlives the executor: the kernel kills it when the executor's process, or the thread that
started it, ends. Its imports are part of every start, so they are kept to what a rank needs.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import traceback
from typing import Any

from executor.call_codec import CALL, Call, Reply, decode_call, encode_reply
from executor.control import (
    OUTPUT_RANK,
    CacheSize,
    Capacity,
    EnteredPhase,
    Failure,
    Ready,
    StartOrder,
    receive_from_executor,
    send,
)
from executor.errors import described, traceback_of
from executor.host import PAGE_PHASES, WorkerHost
from executor.rank_process import STACK_SIGNAL
from executor.step_codec import STEP, decode_step, encode_output
from transport.clock import SYSTEM_CLOCK
from transport.codec import decode
from transport.collective import Collective
from transport.errors import QueueClosed, WriterDied
from transport.heartbeat import Heartbeat
from transport.message_queue import MessageQueue
from transport.processes import die_with_parent, kill_when_closed
from transport.state_page import StatePage
from transport.state_rows import RankRow

_ATTACH_TIMEOUT_S = 30.0
_now = SYSTEM_CLOCK.monotonic


def main(argv: list[str]) -> int:
    rank, control_fd, death_fd, page_fd, stack_fd, *collective_fds = map(int, argv)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which stops its ranks in order
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it goes the way of stderr
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, stack_fd, all_threads=True)
    kill_when_closed(death_fd, os.getpid())
    # The engine puts the rank in front of each line.
    logging.basicConfig(level=logging.INFO, format="%(levelname).1s %(name)s: %(message)s")
    control = socket.socket(fileno=control_fd)
    order = receive_from_executor(control, StartOrder)
    die_with_parent(order.parent_pid)
    row = StatePage(page_fd).rank(rank)
    row.claim()
    Heartbeat(row).start()
    sys.path.extend(path for path in order.sys_path if path not in sys.path)

    collective = None
    if collective_fds:
        # Longer than the executor waits for a step: it knows better which rank is to blame.
        timeout_s = 1.5 * order.config.execute_timeout_s
        collective = Collective(collective_fds, rank, timeout_s=timeout_s, name="ranks")
        collective.on_sleep = lambda awaited: RankRow.waits_for.store(row, awaited + 1)
    host = WorkerHost(order.config, rank, order.world_size, collective)

    def enter_phase(phase: str) -> None:
        row.enter(PAGE_PHASES[phase], _now())
        send(control, EnteredPhase(phase))

    try:
        capacity = host.start(enter_phase)
        send(control, Capacity(capacity, host.model, host.max_model_len))
        host.initialize_cache(receive_from_executor(control, CacheSize).num_blocks)
        send(control, EnteredPhase("ready"))
        broadcast = MessageQueue.attach(order.broadcast, rank, timeout_s=_ATTACH_TIMEOUT_S)
        answers = MessageQueue.create(n_local=1, name=f"answers of rank {rank}")
    except Exception as error:
        traceback.print_exc()
        fail(row, error)
        send(control, Failure(described(error)))
        return 1
    row.enter("waiting", _now())
    send(control, Ready(answers.handle()))
    server = RankServer(host, rank, broadcast, answers, control, row, order.config.execute_timeout_s)
    try:
        server.serve()
    except WriterDied:
        return 1  # the kernel's signal is on its way
    row.enter("shutting down", _now())
    host.shutdown()
    if collective is not None:
        collective.close()
    answers.close()
    broadcast.close()
    return 0


class RankServer:
    """Serves steps and calls in the order of the broadcast."""

    def __init__(
        self,
        host: WorkerHost,
        rank: int,
        broadcast: MessageQueue,
        answers: MessageQueue,
        control: socket.socket,
        row: RankRow,
        answer_timeout_s: float,
    ) -> None:
        self._host = host
        self._rank = rank
        self._broadcast = broadcast
        self._answers = answers
        self._control = control
        self._row = row
        self._answer_timeout_s = answer_timeout_s
        self._failed = False

    def serve(self) -> None:
        """Returns when the executor closes the broadcast. Raises WriterDied if it vanishes."""
        while True:
            try:
                # No deadline: how long the engine has nothing to do is not for a rank to judge, and its
                # death is noticed. A copy, because the worker may keep the step's arrays.
                message = self._broadcast.dequeue_copy(math.inf)
            except QueueClosed:
                return
            kind, head, arrays = decode(message)
            if kind == STEP:
                self._run_step(head, arrays)
            elif kind == CALL:
                self._run_call(decode_call(head, arrays))
            else:
                raise ValueError(f"message of unknown kind {kind}")

    def _run_step(self, head: memoryview, arrays: list[Any]) -> None:
        seq, step = decode_step(head, arrays)
        if self._failed:
            return  # the batch is undefined: a step already sent must not run on it
        self._row.begin_step(seq, step.step_id, _now())
        try:
            output = self._host.execute(step)
            if self._rank == OUTPUT_RANK:
                self._answers.enqueue(*encode_output(seq, output), timeout_s=self._answer_timeout_s)
        except Exception as error:
            self._failed = True
            traceback.print_exc()
            fail(self._row, error)
            send(self._control, Failure(described(error), "execute_model", step.step_id))
            return
        self._row.end(_now())

    def _run_call(self, call: Call) -> None:
        self._row.begin(call.seq, call.method, _now())
        try:
            value = self._host.call(call.method, call.args, call.kwargs)
            if call.reply_rank is not None and call.reply_rank != self._rank:
                value = None
            parts = encode_reply(Reply(call.seq, value))
        except Exception as error:
            parts = encode_reply(Reply(call.seq, error=described(error), traceback=traceback_of(error)))
        self._answers.enqueue(*parts, timeout_s=self._answer_timeout_s)
        self._row.end(_now())


def fail(row: RankRow, error: Exception) -> None:
    row.error = described(error)
    row.enter("failed", _now())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
