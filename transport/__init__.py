"""Bytes between processes: a shared-memory ring, waiting, message queues, and how a message is laid out."""

from transport.clock import SYSTEM_CLOCK, Clock, SystemClock
from transport.errors import (
    AttachRefused,
    Cancelled,
    CodecError,
    MessageLost,
    PeerDied,
    QueueClosed,
    QueueFull,
    ReaderDied,
    TransportError,
    TransportTimeout,
    WriterDied,
)
from transport.message_queue import CurveKeys, Handle, Message, MessageQueue, QueueStats
from transport.processes import ProcessIdentity
from transport.ring import RingReader, RingWriter, ShmRingBuffer
from transport.waiting import SpinCondition, WaitPolicy, memory_fence

__all__ = [
    "SYSTEM_CLOCK",
    "AttachRefused",
    "Cancelled",
    "Clock",
    "CodecError",
    "CurveKeys",
    "Handle",
    "Message",
    "MessageLost",
    "MessageQueue",
    "PeerDied",
    "ProcessIdentity",
    "QueueClosed",
    "QueueFull",
    "QueueStats",
    "ReaderDied",
    "RingReader",
    "RingWriter",
    "ShmRingBuffer",
    "SpinCondition",
    "SystemClock",
    "TransportError",
    "TransportTimeout",
    "WaitPolicy",
    "WriterDied",
    "memory_fence",
]
