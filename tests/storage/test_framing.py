# SPDX-License-Identifier: Apache-2.0
"""Files written around a tensor are the files torch.save writes."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from typing import Any

import pytest
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.serialization import config

from megads_ucp.storage import PAYLOAD_ALIGNMENT, FileWriter, frame, open_tensor
from megads_ucp.storage.checksum import crc32_combine
from megads_ucp.storage.framing import ALIGNED_FROM
from tests.support.tensor_files import write_file

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)
SHAPES = st.lists(st.integers(0, 7), max_size=4).map(tuple)
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "cat_dim": st.integers(0, 1),
        "param_n_sub_params": st.just(2),
        "vocab_tensor": st.booleans(),
        "sub_param_shape": st.builds(
            SubparamShape,
            patterns=st.lists(st.text(max_size=9), max_size=2),
            shape=st.tuples(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 9)),
            partition_dim=st.integers(0, 1),
        ),
        "PK\x07\x08 archive/data/0": st.text(),
    },
)


def some_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype).copy_(torch.rand(shape) * 100)


def saved_by_torch(content: dict[str, Any]) -> bytes:
    stream, alignment = io.BytesIO(), PAYLOAD_ALIGNMENT if content["param"].nbytes >= ALIGNED_FROM else 64
    with config.patch("save.storage_alignment", alignment):  # type: ignore[attr-defined]
        torch.save(content, stream)
    return stream.getvalue()


def serialization_id(file: bytes) -> bytes:
    return zipfile.ZipFile(io.BytesIO(file)).read("archive/.data/serialization_id")


def with_serialization_id(file: bytes, wanted: bytes) -> bytes:
    """The same file with another hash of its content, which stands there once, and its CRC-32, twice."""
    own = serialization_id(file)
    file = file.replace(own, wanted)
    return file.replace(struct.pack("<I", zlib.crc32(own)), struct.pack("<I", zlib.crc32(wanted)))


@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), metadata=METADATA)
@settings(max_examples=60, deadline=None)
def test_a_framed_file_is_byte_for_byte_that_of_torch_save(tmp_path_factory, shape, dtype, metadata):
    tensor = some_tensor(shape, dtype)
    path = tmp_path_factory.getbasetemp() / "framed.pt"
    framed = frame(shape, dtype, metadata)
    write_file(path, framed, tensor)

    written, reference = path.read_bytes(), saved_by_torch({"param": tensor, **metadata})
    assert len(written) == framed.nbytes
    assert with_serialization_id(written, serialization_id(reference)) == reference
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("numel", [ALIGNED_FROM // 4, (1 << 30) - 20, 1 << 30, 3 << 30])
@pytest.mark.parametrize("size", [0, 1, 700, 4000, 9000])
def test_a_large_payload_begins_on_a_page(numel, size):
    """Whatever the size of the pickle before it."""
    assert frame((numel,), torch.float32, {"note": "x" * size}).payload_offset % PAYLOAD_ALIGNMENT == 0


def test_torch_load_may_calculate_where_the_payload_is_instead_of_looking(tmp_path):
    write_file(tmp_path / "a.pt", frame((3,), torch.float32, {}), torch.arange(3.0))
    with config.patch("load.calculate_storage_offsets", True):  # type: ignore[attr-defined]
        assert torch.load(tmp_path / "a.pt", mmap=True)["param"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.uint16])
def test_torch_load_returns_the_tensor(tmp_path, shape, dtype, mmap):
    tensor = some_tensor(shape, torch.float32).to(dtype)
    write_file(tmp_path / "a.pt", frame(shape, dtype, {"cat_dim": 1}), tensor)
    loaded = torch.load(tmp_path / "a.pt", mmap=mmap, weights_only=True)
    assert loaded["cat_dim"] == 1 and loaded["param"].dtype == dtype and loaded["param"].shape == shape
    assert torch.equal(loaded["param"].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_sub_param_shape_loads_weights_only_once_allowed(tmp_path):
    shape = SubparamShape(patterns=[r"layers\.\d+"], shape=((4, 6), 3), partition_dim=0)
    write_file(tmp_path / "a.pt", frame((10, 3), torch.float32, {"sub_param_shape": shape}), torch.zeros(30))
    with torch.serialization.safe_globals([SubparamShape]):
        assert torch.load(tmp_path / "a.pt", weights_only=True)["sub_param_shape"] == shape
    assert open_tensor(tmp_path / "a.pt").metadata == {"sub_param_shape": shape}
    assert SubparamShape not in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("numel", [(1 << 30) - 20, 1 << 30, 3 << 30])
def test_payloads_around_and_beyond_4_gib(tmp_path, numel):
    """The zip format changes there (zip64). Only the last element of each file is written, the rest is a hole."""
    path = tmp_path / "large.pt"
    framed = frame((numel,), torch.float32, {})
    file = FileWriter(path, framed)
    extent = file.write(4 * (numel - 1), [torch.tensor([1.5])])
    file.write(0, [torch.zeros(0)])  # what precedes the payload
    crc32 = crc32_combine(crc32_of_zeros(4 * (numel - 1)), extent.crc32, 4)
    file.complete(crc32)
    file.close()

    assert os.stat(path).st_size == framed.nbytes
    (entry,) = (info for info in zipfile.ZipFile(path).infolist() if info.filename == "archive/data/0")
    assert (entry.file_size, entry.CRC) == (4 * numel, crc32)
    assert torch.load(path, mmap=True)["param"][-2:].tolist() == [0.0, 1.5]
    assert open_tensor(path).read(numel - 2, 2, torch.empty(2)).tolist() == [0.0, 1.5]


def crc32_of_zeros(nbytes: int) -> int:
    """By repeated doubling: nobody has to look at gigabytes of zeros."""
    if nbytes < 1 << 16:
        return zlib.crc32(bytes(nbytes))
    half = crc32_of_zeros(nbytes // 2)
    return crc32_combine(crc32_combine(half, half, nbytes // 2), zlib.crc32(bytes(nbytes % 2)), nbytes % 2)


def test_a_frame_needs_no_memory_for_its_tensor():
    assert frame((1 << 20, 1 << 20), torch.float32, {}).payload_bytes == 1 << 42


def set_deterministic(on: bool) -> None:
    torch._C._set_deterministic_algorithms(on)  # torch.use_deterministic_algorithms, less its seconds of imports


def set_crc32_off(on: bool) -> None:
    torch.serialization.set_crc32_options(not on)


@pytest.mark.parametrize("switch", [set_deterministic, set_crc32_off])
def test_switches_that_change_torch_save_change_no_frame(switch):
    plain = frame((1 << 20,), torch.bfloat16, {"cat_dim": 0})
    switch(True)
    try:
        assert frame((1 << 20,), torch.bfloat16, {"cat_dim": 0}) == plain
        assert frame((1 << 40,), torch.bfloat16, {"cat_dim": 0}).payload_bytes == 1 << 41
    finally:
        switch(False)


def test_a_tensor_among_the_metadata_is_refused():
    with pytest.raises(TypeError, match=r"must not hold tensors.*step"):
        frame((2,), torch.float32, {"step": torch.ones(1)})
