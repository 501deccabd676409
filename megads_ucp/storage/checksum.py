# SPDX-License-Identifier: Apache-2.0
"""CRC-32, by blocks too, and the checksum of a whole from the checksums of its parts.

The checksum is that of zip files and of zlib, by the fastest library there is: isal and zlib-ng multiply without carry
(PCLMULQDQ, PMULL), several times as fast as zlib, whose cost would be felt beside a write to memory.

Several ranks may write a file without seeing each other's bytes, but its zip directory needs one CRC-32 over all of
them. CRC-32 is linear, so the parts' checksums are enough. The method is zlib's own ``crc32_combine_`` (crc32.c,
1.2.12 and later), which Python's :mod:`zlib` does not expose: appending ``n`` bytes multiplies the checksum by
``x**(8 n)`` modulo the CRC polynomial.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

BLOCK_BYTES = 4 << 20
"""Bytes per checksummed block: small enough to verify a range at little cost, large enough for short lists."""

LIBRARIES = ("isal.isal_zlib", "zlib_ng.zlib_ng", "zlib")
"""Modules with a ``crc32`` like zlib's, the fastest first; only the last is always there."""


_POLYNOMIAL = 0xEDB88320  # of CRC-32, reflected: bit 31 is the coefficient of x**0


_ONE = 1 << 31


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _squares() -> tuple[int, ...]:
    """``x**(2**k)`` for k = 0 .. 31. The sequence repeats from there: the order of x is 2**32 - 1."""
    powers = [_ONE >> 1]
    while len(powers) < 32:
        powers.append(_multiply(powers[-1], powers[-1]))
    return tuple(powers)


_X_TO_TWO_TO = _squares()


@functools.lru_cache(maxsize=1 << 12)  # the extents of a checkpoint have few sizes
def _shift(nbytes: int) -> int:
    """``x**(8 * nbytes)``: the factor of a checksum when ``nbytes`` more bytes follow."""
    power, bit = _ONE, 3
    while nbytes:
        if nbytes & 1:
            power = _multiply(_X_TO_TWO_TO[bit % 32], power)
        nbytes >>= 1
        bit += 1
    return power


_WHOLE_BLOCK = _shift(BLOCK_BYTES)


def first_importable(names: Iterable[str], load: Callable[[str], ModuleType] = importlib.import_module) -> ModuleType:
    """The first of some modules that is installed.

    Raises:
        ImportError: none is.
    """
    for name in names:
        try:
            return load(name)
        except ImportError:
            continue
    raise ImportError(f"none of {list(names)} is installed")


_crc32: Callable[[bytes | bytearray | memoryview, int], int] = first_importable(LIBRARIES).crc32


def crc32(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC-32 of contiguous bytes, equal to :func:`zlib.crc32`.

    Other threads run meanwhile if the data has more than a few kB.

    Args:
        data: the bytes.
        value: CRC-32 of what precedes them.
    """
    return _crc32(data, value)


def crc32_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """CRC-32 of A + B, from the CRC-32 of each and the length of B in bytes."""
    return _multiply(_shift(len_b), crc_a) ^ crc_b


def blocks(data: memoryview) -> Iterator[memoryview]:
    """``data`` cut into pieces of :data:`BLOCK_BYTES`, the last one shorter; nothing for no data."""
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]


def block_sizes(nbytes: int) -> Iterator[int]:
    """Sizes of the pieces that :func:`blocks` cuts ``nbytes`` bytes into."""
    for start in range(0, nbytes, BLOCK_BYTES):
        yield min(BLOCK_BYTES, nbytes - start)


def crc32_of_blocks(block_crc32: Iterable[int], nbytes: int) -> int:
    """CRC-32 of ``nbytes`` contiguous bytes, from the CRC-32 of each of their blocks."""
    crc = 0
    for block, size in zip(block_crc32, block_sizes(nbytes), strict=True):
        if crc:  # nothing precedes the first block, and a product costs microseconds
            crc = _multiply(_WHOLE_BLOCK if size == BLOCK_BYTES else _shift(size), crc)
        crc ^= block
    return crc
