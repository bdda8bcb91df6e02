"""The running batch as columns.

Row i of every column belongs to the i-th running request in scheduling order. Rows are dense, so that a
step of the whole batch is a few operations on slices; when requests leave, the rows behind them move up,
and the steps that are still with the workers are told (`InFlightStep.rows`).

Which columns who writes, and when:

    column        meaning                                              written
    slot          row in the workers' batch, kept while it runs        add
    known         prompt and output tokens                             add, update_from_output
    computed      tokens whose KV is computed, in-flight included      add, schedule
    placeholders  output tokens that steps in flight sample (async)    schedule, update_from_output
    limit         known tokens at which the length ends the request    add
    eos           token id that ends the request; -1: none             add
    capacity      tokens that the request's blocks hold                add, schedule
    next_name     known tokens at which the next block gets its name   add, schedule, update_from_output
    chunk         1 if its last step left known tokens uncomputed      schedule
    client        client_index                                         add
    care          bits below: what keeps it from the plain path        add, update_from_output
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine_core.request import Request
from executor.step import Int32s

# Bits of `care`.
ONCE = 1  # the next output carries more than a token: prefill stats or events
ALWAYS = 2  # every output does: log-probs
REPEATS = 4  # its tokens may end it by repetition

NEVER = np.iinfo(np.int32).max


class Columns(NamedTuple):
    """Views of the columns, (n,) int32 each, valid until requests join or leave."""

    slot: Int32s
    known: Int32s
    computed: Int32s
    placeholders: Int32s
    limit: Int32s
    eos: Int32s
    capacity: Int32s
    next_name: Int32s
    chunk: Int32s
    client: Int32s
    care: Int32s


class Row(NamedTuple):
    """One row, as ints."""

    slot: int
    known: int
    computed: int
    placeholders: int
    limit: int
    eos: int
    capacity: int
    next_name: int
    chunk: int
    client: int
    care: int


SLOT, KNOWN, COMPUTED, PLACEHOLDERS, LIMIT, EOS, CAPACITY, NEXT_NAME, CHUNK, CLIENT, CARE = range(
    len(Columns._fields)
)


@dataclass(slots=True)
class InFlightStep:
    """A step that the workers have not answered yet."""

    step_id: int
    requests: list[Request]  # in the step's order
    num_scheduled_tokens: Int32s
    samples: npt.NDArray[np.bool_]  # whether it computes the last of a request's known tokens
    rows: Int32s | None  # where they are in the batch now, -1: no longer; None: rows 0 .. n - 1, in order

    def row_list(self) -> Int32s:
        if self.rows is None:
            return np.arange(len(self.requests), dtype=np.int32)
        return self.rows


class RunningBatch:
    """At most `max_num_seqs` requests, each with a slot below that."""

    def __init__(self, max_num_seqs: int, block_size: int) -> None:
        self.block_size = block_size
        self.requests: list[Request] = []
        self.version = 0  # grows when a request joins or leaves
        self.table = np.zeros((len(Columns._fields), max_num_seqs), np.int32)
        # By slot: the known tokens of the last, partial block; position p is at p % block_size.
        self.tail = np.zeros((max_num_seqs, block_size), np.int32)
        self.clients: dict[int, int] = {}  # client_index: number of its running requests
        self.stop_ids: dict[int, int] = {}  # token id's lower 16 bits: number of stop ids of running requests
        self._stops = np.zeros(1 << 16, bool)  # by those bits: whether there are any
        self.in_flight: list[InFlightStep] = []  # oldest first
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._columns = Columns(*self.table[:, :0])

    def __len__(self) -> int:
        return len(self.requests)

    def columns(self) -> Columns:
        count = len(self.requests)
        if len(self._columns.slot) != count:
            self._columns = Columns(*self.table[:, :count])
        return self._columns

    def row(self, row: int) -> Row:
        return Row(*self.table[:, row].tolist())

    def add(self, request: Request, computed: int, limit: int, next_name: int, care: int) -> None:
        """Append a row for a request whose tokens are all in the request."""
        self.version += 1
        known = request.num_known_tokens
        slot = self._free_slots.pop()
        request.slot = slot
        eos = request.params.eos_token_id
        self.table[:, len(self.requests)] = (
            slot,
            known,
            computed,
            0,
            limit,
            -1 if eos is None else eos,
            len(request.block_ids) * self.block_size,
            next_name,
            0,
            request.client_index,
            care,
        )
        self.requests.append(request)
        partial = known % self.block_size
        if partial:
            self.tail[slot, :partial] = self._last_tokens(request, partial)
        self.clients[request.client_index] = self.clients.get(request.client_index, 0) + 1
        if request.stop_token_ids:
            self._count_stop_ids(request.stop_token_ids, 1)

    def may_stop(self, tokens: Int32s) -> npt.NDArray[np.bool_]:
        """Which of these tokens may be a stop id of a running request; few others are among them. (n,)"""
        found: npt.NDArray[np.bool_] = self._stops[tokens & 0xFFFF]
        return found

    def _count_stop_ids(self, stop_ids: frozenset[int], change: int) -> None:
        for stop_id in stop_ids:
            bits = stop_id & 0xFFFF
            count = self.stop_ids.pop(bits, 0) + change
            if count:
                self.stop_ids[bits] = count
            self._stops[bits] = count > 0

    @staticmethod
    def _last_tokens(request: Request, count: int) -> Int32s:
        if not request.output:
            return request.prompt[-count:]
        output = np.frombuffer(bytes(request.output[-4 * count :]), np.int32)
        missing = count - len(output)
        return np.concatenate((request.prompt[-missing:], output)) if missing else output

    def file_blocks(self, rows: list[int], known: list[int]) -> Iterator[tuple[Request, bytes]]:
        """The known tokens number `known` of these rows are their blocks' last: file what is not filed yet.

        Yields each request with the int32 tokens of its whole block.
        """
        size = 4 * self.block_size
        requests = [self.requests[row] for row in rows]
        tails = self.tail[[request.slot for request in requests]].tobytes()
        for i, (request, count) in enumerate(zip(requests, known, strict=True)):
            block = tails[i * size : i * size + size]
            unfiled = 4 * (count - request.num_known_tokens)
            request.output += block[size - unfiled :]
            yield request, block

    def output_tail(self, row: int, count: int) -> list[int]:
        """The last `count` output tokens of a row, or all if there are fewer."""
        request = self.requests[row]
        known = int(self.table[KNOWN, row])
        filed = request.num_known_tokens
        tail: list[int] = self.tail[request.slot, filed % self.block_size :][: known - filed].tolist()
        if len(tail) < count and request.output:
            older = np.frombuffer(bytes(request.output[-4 * (count - len(tail)) :]), np.int32)
            tail = older.tolist() + tail
        return tail[-count:]

    def remove(self, rows: list[int]) -> None:
        """Requests leave, given by ascending rows. Their last tokens are filed with them; their slots
        become free.

        Blocks, status and queues are the caller's business.
        """
        self.version += 1
        count = len(self.requests)
        for row, known in zip(rows, self.table[KNOWN, rows].tolist(), strict=True):
            request = self.requests[row]
            self._file_tail(request, known)
            self._free_slots.append(request.slot)
            request.slot = -1
            left = self.clients[request.client_index] - 1
            if left:
                self.clients[request.client_index] = left
            else:
                del self.clients[request.client_index]
            if request.stop_token_ids:
                self._count_stop_ids(request.stop_token_ids, -1)
        if len(rows) == 1:
            row = rows[0]
            self.table[:, row : count - 1] = self.table[:, row + 1 : count]
            del self.requests[row]
            for step in self.in_flight:
                self._row_left(step, row)
            return
        keep = np.ones(count, bool)
        keep[rows] = False
        self.table[:, : count - len(rows)] = self.table[:, :count][:, keep]
        self.requests[:] = compress(self.requests, keep.tolist())
        moved = np.cumsum(keep, dtype=np.int32) - 1
        moved[rows] = -1
        for step in self.in_flight:
            before = step.row_list()
            step.rows = np.where(before < 0, before, moved[before])

    @staticmethod
    def _row_left(step: InFlightStep, row: int) -> None:
        if step.rows is None:
            if row >= len(step.requests):
                return
            step.rows = step.row_list()
        rows = step.rows
        rows[rows == row] = -1
        rows[rows > row] -= 1

    def _file_tail(self, request: Request, known: int) -> None:
        """Move what the tail holds of the output to the request, which has `known` tokens."""
        filed = request.num_known_tokens
        if known > filed:
            start = filed % self.block_size
            request.output += self.tail[request.slot, start : start + known - filed].tobytes()

    def num_in_flight(self, row: int) -> int:
        """Tokens of a row that are with the workers."""
        total = 0
        for step in self.in_flight:
            at = self._position(step, row)
            if at is not None:
                total += int(step.num_scheduled_tokens[at])
        return total

    @staticmethod
    def _position(step: InFlightStep, row: int) -> int | None:
        if step.rows is None:
            return row if row < len(step.requests) else None
        found: npt.NDArray[np.intp] = np.flatnonzero(step.rows == row)
        return int(found[0]) if len(found) else None

    def check(self) -> list[str]:
        """What is wrong with the columns, a sentence each; empty if nothing is."""
        problems: list[str] = []
        slots = [request.slot for request in self.requests]
        everyone = sorted(slots + self._free_slots)
        if everyone != list(range(self.table.shape[1])):
            problems.append("slots are not a partition: " + ", ".join(map(str, everyone)))
        clients: dict[int, int] = {}
        stop_ids: dict[int, int] = {}
        for row, request in enumerate(self.requests):
            clients[request.client_index] = clients.get(request.client_index, 0) + 1
            c = self.row(row)
            who = f"running request {request.request_id}"
            if c.slot != request.slot:
                problems.append(f"{who} has slot {request.slot}, its row says {c.slot}")
            if c.capacity != len(request.block_ids) * self.block_size:
                problems.append(f"{who} has {len(request.block_ids)} blocks, room for {c.capacity} tokens")
            if c.computed > c.capacity:
                problems.append(f"{who} has {c.computed} tokens computed in room for {c.capacity}")
            if c.computed > c.known + c.placeholders:
                problems.append(f"{who} has {c.computed} tokens computed of {c.known} + {c.placeholders}")
            filed = request.num_known_tokens
            if not max(request.num_prompt_tokens, c.known - c.known % self.block_size) <= filed <= c.known:
                problems.append(f"{who} knows {c.known} tokens, of which {filed} are filed")
            for stop_id in request.stop_token_ids or ():
                stop_ids[stop_id & 0xFFFF] = stop_ids.get(stop_id & 0xFFFF, 0) + 1
        if stop_ids != self.stop_ids or set(self._stops.nonzero()[0].tolist()) != set(stop_ids):
            problems.append(f"stop ids are counted as {self.stop_ids}, but are {stop_ids}")
        if clients != self.clients:
            problems.append(f"clients are counted as {self.clients}, but are {clients}")
        return problems
