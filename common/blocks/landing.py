"""Where the KV of hand-offs lands: one area per transfer, forgotten when the transfer ends.

An area's life: opened (its ticket goes to the sender) → written by the sender, read by the receiver → closed. A write
after that reaches nothing: a file that is unlinked, or a transfer id that is unknown. Only the memory of an area whose
sender has said that it writes no more serves another transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from common.blocks.segment import SUFFIX, Segment
from common.blocks.spare_segments import SpareSegments, drop
from common.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from common.hand_off import GRPC, SHM, Landing, Ticket

LANDING_PREFIX = "landing-"


class Landings:
    """The open areas of one receiver. `address` is that of its gRPC server, set once it listens."""

    def __init__(self, shm_dir: Path, worker_id: str, incarnation: str, block_bytes: int) -> None:
        self._shm_dir, self._block_bytes = shm_dir, block_bytes
        self._worker_id, self._incarnation, self.address = worker_id, incarnation, ""
        self._by_message: dict[str, MemoryLanding] = {}
        self._spares = SpareSegments(shm_dir)

    def open(self, transport: str, transfer_id: str, num_blocks: int) -> Landing:
        """Raises `Overloaded` or `Unavailable` when there is no memory for the area."""
        path = self._shm_dir / f"{LANDING_PREFIX}{transfer_id}{SUFFIX}" if transport == SHM else None
        ticket = Ticket(transport, self._worker_id, self._incarnation, self.address, str(path or ""),
                        self._block_bytes, num_blocks)
        if path is not None:
            return FileLanding(ticket, path, self._spares)
        landing = MemoryLanding(ticket, lambda: self._by_message.pop(transfer_id, None))
        self._by_message[transfer_id] = landing
        return landing

    def write(self, transfer_id: str, first_block: int, num_blocks: int, offset: int, payload: bytes) -> None:
        """A part of a message transfer: `payload` at `offset` bytes into the blocks that start at `first_block`.

        Raises `NotFound` for a transfer that has ended, `InvalidRequest` for bytes outside the area.
        """
        landing = self._by_message.get(transfer_id)
        if landing is None:
            raise NotFound("transfer_id: no such transfer is open here", param="transfer_id")
        if offset + len(payload) > num_blocks * self._block_bytes:
            raise InvalidRequest("offset: beyond the blocks that it names", param="offset")
        landing.write(first_block * self._block_bytes + offset, payload)

    def close(self) -> None:
        """When no area is open any more."""
        self._by_message.clear()
        self._spares.close()


class FileLanding:
    """An area in shared memory; the sender maps the same file."""

    def __init__(self, ticket: Ticket, path: Path, spares: SpareSegments) -> None:
        self.ticket = ticket
        self._spares = spares
        num_bytes = ticket.num_blocks * ticket.block_bytes
        try:
            self._segment: Segment = spares.take(path, num_bytes)
        except OSError as error:
            raise Unavailable(f"no landing file of {num_bytes} bytes: {error.strerror}", retry_after_s=1.0) from None
        try:  # without its memory, a write into it would kill the sender
            self._segment.reserve(0, num_bytes)
        except Overloaded:
            drop(self._segment)
            raise

    def view(self, index: int) -> memoryview:
        return self._segment.view(index * self.ticket.block_bytes, self.ticket.block_bytes)

    def close(self, *, quiet: bool) -> None:
        if quiet:
            self._spares.give_back(self._segment)
        else:
            drop(self._segment)


class MemoryLanding:
    """An area in this process, filled from messages."""

    def __init__(self, ticket: Ticket, on_close: Callable[[], object]) -> None:
        assert ticket.transport == GRPC
        self.ticket = ticket
        self._on_close = on_close
        self._bytes = memoryview(bytearray(ticket.num_blocks * ticket.block_bytes))

    def view(self, index: int) -> memoryview:
        return self._bytes[index * self.ticket.block_bytes : (index + 1) * self.ticket.block_bytes]

    def write(self, at: int, payload: bytes) -> None:
        """Raises `InvalidRequest` for bytes outside the area."""
        if at + len(payload) > len(self._bytes):
            raise InvalidRequest("first_block: outside the area of this transfer", param="first_block")
        self._bytes[at : at + len(payload)] = payload

    def close(self, *, quiet: bool) -> None:
        self._on_close()
