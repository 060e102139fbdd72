"""Byte offsets of the words of a channel and of its slots; ``channel.py`` defines their meaning."""

from __future__ import annotations

from typing import Final

DOORBELL: Final = 64
CORE: Final = 68
CALLS_WITHOUT: Final = 72
USED_SLOTS: Final = 76
SLEEPING: Final = 128
SPIN: Final = 192
GIVE_WAY: Final = 196
GATE: Final = 256
PROGRAM: Final = 320
OPENED: Final = 384

FIRST_SLOT: Final = 1 << 16
STRIDE: Final = 1 << 16
NUM_SLOTS: Final = 15
"""Number of the program's threads that can be inside a call at the same time; others wait for a slot."""

# In a slot.
REPLY: Final = 64
WAITING: Final = 128
POSTED: Final = 192
TAKEN: Final = 256
BODY: Final = 320
RING: Final = 49152

RING_BYTES: Final = STRIDE - RING
BODY_BYTES: Final = RING - BODY
"""Room for one request or one reply, with the payload that travels in it."""

ARENA_START: Final = 0x2000_0000_0000
"""The address where both halves map the arena: between a program's own part and where the kernel maps files, on all
platforms with addresses of 47 bits."""
