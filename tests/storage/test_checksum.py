# SPDX-License-Identifier: Apache-2.0
"""The fast checksum is zlib's, and parts make a whole."""

from __future__ import annotations

import os
import zlib
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megads_ucp.storage.checksum import (
    BLOCK_BYTES,
    LIBRARIES,
    blocks,
    crc32,
    crc32_combine,
    crc32_of_blocks,
    first_importable,
)


@given(size=st.integers(0, 20_000), seed=st.integers(0, 255), value=st.integers(0, 2**32 - 1))
def test_the_checksum_is_that_of_zlib(size, seed, value):
    data = (bytes(range(256)) * 80)[seed : seed + size]
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data), value) == zlib.crc32(data, value)


@pytest.mark.parametrize("installed", [LIBRARIES, LIBRARIES[1:], LIBRARIES[2:]])
def test_the_fastest_library_that_is_installed_is_taken(installed):
    def load(name: str) -> ModuleType:
        if name not in installed:
            raise ImportError(name)
        return ModuleType(name)

    assert first_importable(LIBRARIES, load).__name__ == installed[0]


@pytest.mark.parametrize("name", LIBRARIES)
def test_every_library_that_is_installed_here_gives_the_same(name):
    library = pytest.importorskip(name)
    data = os.urandom(100_000)
    assert library.crc32(data, 7) == zlib.crc32(data, 7)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc32_combine_is_the_crc32_of_the_concatenation(a, b):
    assert crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 12345])
def test_the_crc32_of_blocks_is_that_of_the_whole(nbytes):
    data = memoryview(os.urandom(nbytes))
    assert crc32_of_blocks([zlib.crc32(block) for block in blocks(data)], nbytes) == zlib.crc32(data)
