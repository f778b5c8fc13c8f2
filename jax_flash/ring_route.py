"""Plans where blocks of keys and values travel on the ring, and which visits are worth making."""

from __future__ import annotations

import dataclasses
import functools

from jax_flash.spec import AttentionSpec, SequenceSharding


@dataclasses.dataclass(frozen=True)
class Route:
    """Says where blocks of keys travel: at step k, device d is visited by that of d - shifts[k].

    Attributes:
      devices: on the ring.
      shifts: ascending from 0.
      visits: for each step, the devices whose queries may attend to what visits them.
    """

    devices: int
    shifts: tuple[int, ...]
    visits: tuple[frozenset[int], ...]

    @property
    def is_regular(self) -> bool:
        """Says whether every hop is to the next device."""
        return self.shifts == tuple(range(len(self.shifts)))

    def hop(self, step: int) -> list[tuple[int, int]]:
        """Returns (from, to) of each block that is needed at some step after `step`."""
        shift, following = self.shifts[step], self.shifts[step + 1]
        pairs = []
        for home in range(self.devices):
            later = zip(self.shifts[step + 1 :], self.visits[step + 1 :], strict=True)
            if any((home + s) % self.devices in visited for s, visited in later):
                pairs.append(((home + shift) % self.devices, (home + following) % self.devices))
        return pairs

    def hop_of_gradients(self, step: int) -> list[tuple[int, int]]:
        """Returns (from, to) of all gradients' hops after `step`; the last one takes them home."""
        shift, following = self.shifts[step], (*self.shifts, 0)[step + 1]
        return [((d + shift) % self.devices, (d + following) % self.devices)
                for d in range(self.devices)]  # fmt: skip


@functools.lru_cache(maxsize=256)
def plan_route(spec: AttentionSpec, sequence: SequenceSharding, q_len: int, kv_len: int) -> Route:
    """Leaves out every visit that causal order and window make useless, as far as is known.

    Without queries or keys, it leaves out all visits: XLA crashes if it sends empty arrays.
    """
    devices = sequence.devices
    left, right = spec.window
    if spec.is_causal:
        right = 0
    # As `ring_blocks` bounds offsets, so that the greatest size of a window is no limit.
    room = max(q_len, kv_len)
    offset = min(max(sequence.offset or 0, -(2**31) + room), 2**31 - 1 - room)
    q_size, kv_size = (length // (devices * sequence.chunks) for length in (q_len, kv_len))

    def sees(device, source):
        if q_size == 0 or kv_size == 0:
            return False
        if sequence.offset is None:
            return True
        for q_start in sequence.chunk_starts(device, q_len):
            first = q_start + offset
            last = first + q_size - 1
            for kv_start in sequence.chunk_starts(source, kv_len):
                before = right is None or kv_start <= last + right
                after = left is None or kv_start + kv_size - 1 >= first - left
                if before and after:
                    return True
        return False

    shifts, visits = [], []
    for shift in range(devices):
        visited = frozenset(d for d in range(devices) if sees(d, (d - shift) % devices))
        if visited or shift == 0:
            shifts.append(shift)
            visits.append(visited)
    return Route(devices, tuple(shifts), tuple(visits))
