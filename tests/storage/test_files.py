# SPDX-License-Identifier: Apache-2.0
"""Writing, reading and verifying single checkpoint files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pickle
import random
import shutil
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from hypothesis import given, settings
from hypothesis import strategies as st

from megads_ucp.engine.compat import PICKLED_CLASSES
from megads_ucp.errors import StorageError
from megads_ucp.storage import (
    ExtentRecord,
    FileRecord,
    FileWriter,
    frame,
    open_tensor,
    read_object,
    split_crc32,
    verify_file,
    write_manifest,
    write_object,
)
from megads_ucp.storage.checksum import BLOCK_BYTES, blocks, crc32
from tests.support.children import exit_code, start_child
from tests.support.manifests import manifest
from tests.support.reads import payload_counted
from tests.support.tensor_files import complete, write_file, write_part


def write_whole(path: Path, tensor: torch.Tensor, **metadata: object) -> FileRecord:
    framed = frame(tuple(tensor.shape), tensor.dtype, metadata)
    return FileRecord.of_tensor(framed, [write_file(path, framed, tensor, root=path.parent)])


# ---- writing


def test_extents_written_by_several_processes_in_any_order_make_the_same_file(tmp_path):
    tensor = torch.randn(3 * BLOCK_BYTES // 4 + 1001)
    data = tensor.view(torch.uint8)
    framed = frame(tuple(tensor.shape), tensor.dtype, {"cat_dim": 0})
    write_file(tmp_path / "whole.pt", framed, tensor)
    cuts = [0, 8, BLOCK_BYTES + 8, BLOCK_BYTES + 40, 3 * BLOCK_BYTES, data.numel()]

    for seed in range(3):
        path = tmp_path / f"split{seed}.pt"
        pieces = list(itertools.pairwise(cuts))
        random.Random(seed).shuffle(pieces)

        def writer(start, stop, path=path):
            extent = write_part(path, framed, start, data[start:stop], tmp_path)
            (tmp_path / f"{path.name}.{start}").write_bytes(pickle.dumps(extent))

        children = [start_child(partial(writer, start, stop)) for start, stop in pieces]
        assert [exit_code(child) for child in children] == [0] * len(pieces)
        extents = [pickle.loads((tmp_path / f"{path.name}.{start}").read_bytes()) for start, _ in pieces]
        complete(path, framed, split_crc32(extents)[path.name])

        assert path.read_bytes() == (tmp_path / "whole.pt").read_bytes()
        verify_file(path, FileRecord.of_tensor(framed, extents))


def test_what_follows_the_payload_may_come_before_it(tmp_path):
    tensor = torch.arange(100.0)
    whole = write_file(tmp_path / "whole.pt", framed := frame((100,), tensor.dtype, {}), tensor)
    complete(tmp_path / "split.pt", framed, whole.crc32)
    write_part(tmp_path / "split.pt", framed, 200, tensor[50:])
    write_part(tmp_path / "split.pt", framed, 0, tensor[:50])
    assert (tmp_path / "split.pt").read_bytes() == (tmp_path / "whole.pt").read_bytes()


def test_more_buffers_than_one_call_takes_are_written(tmp_path):
    file, content = FileWriter(tmp_path / "a.pt", frame((5000, 3), torch.float32, {})), torch.randn(5000, 3)
    record = file.write(0, list(content))
    file.complete(record.crc32)
    file.close()
    assert torch.equal(torch.load(tmp_path / "a.pt")["param"], content)


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6), st.integers(0, 40))
@settings(max_examples=6, deadline=None)
def test_buffers_are_written_one_after_the_other_and_checksummed_as_one(tmp_path_factory, cuts, start):
    path, content = (
        tmp_path_factory.getbasetemp() / "buffers.pt",
        torch.randint(256, (3 * BLOCK_BYTES,), dtype=torch.uint8),
    )
    framed = frame((len(content) + start,), torch.uint8, {})
    edges = [0, *sorted(cuts), len(content)]
    file = FileWriter(path, framed, path.parent)
    record = file.write(start, [content[a:b] for a, b in itertools.pairwise(edges)])
    file.close()
    assert record == ExtentRecord(
        "buffers.pt", start, len(content), tuple(crc32(block) for block in blocks(content.numpy().data))
    )
    assert path.read_bytes()[framed.payload_offset + start :][: len(content)] == content.numpy().tobytes()


def test_a_record_tells_where_the_payload_is(tmp_path):
    tensor = torch.randn(7, 9).to(torch.bfloat16)
    record = write_whole(tmp_path / "a.pt", tensor)
    payload = (tmp_path / "a.pt").read_bytes()[record.payload_offset :][: record.payload_bytes]
    assert payload == tensor.view(torch.uint8).numpy().tobytes()
    assert (record.path, record.dtype, record.shape) == ("a.pt", "bfloat16", (7, 9))


def test_bytes_may_stand_for_a_tensor(tmp_path):
    write_file(tmp_path / "a.pt", frame((2,), torch.int64, {}), memoryview(bytes([1, *[0] * 7, 2, *[0] * 7])))
    assert torch.load(tmp_path / "a.pt")["param"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("start", "numel"),
    [(-4, 1), (0, 11), (40, 1)],
)
def test_an_extent_outside_its_file_is_refused(tmp_path, start, numel):
    with pytest.raises(ValueError, match=r"a\.pt: .* do not fit the 40 bytes"):
        write_part(tmp_path / "a.pt", frame((10,), torch.float32, {}), start, torch.zeros(numel))
    assert not (tmp_path / "a.pt").read_bytes()


def test_a_tensor_that_is_not_contiguous_is_refused(tmp_path):
    with pytest.raises(ValueError, match="contiguous"):
        write_file(tmp_path / "a.pt", frame((2, 2), torch.float32, {}), torch.zeros(2, 2).T)


def test_objects_keep_their_content(tmp_path):
    content: dict[str, Any] = {"step": torch.tensor(7.0), "param_groups": [{"lr": 0.1}], "shared": [torch.ones(3)] * 2}
    record = FileRecord.of_object(write_object(tmp_path / "optimizer_state.pt", content, root=tmp_path))
    verify_file(tmp_path / "optimizer_state.pt", record)
    assert zipfile.ZipFile(tmp_path / "optimizer_state.pt").testzip() is None
    loaded = read_object(tmp_path / "optimizer_state.pt")
    assert torch.equal(loaded["step"], content["step"]) and loaded["param_groups"] == [{"lr": 0.1}]
    assert loaded["shared"][0] is loaded["shared"][1]


def test_a_full_disk_is_reported_with_path_reason_and_cause():
    with pytest.raises(StorageError, match=r"cannot write /dev/full: No space left on device .*free space") as caught:
        write_part(Path("/dev/full"), frame((10,), torch.float32, {}), 0, torch.zeros(10))
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("write", ["part", "object", "manifest"])
def test_a_vanished_directory_is_reported(tmp_path, write):
    path, framed = tmp_path / "gone" / "a.pt", frame((10,), torch.float32, {})
    with pytest.raises(StorageError, match=r"cannot write .*gone.*deleted meanwhile"):
        {
            "part": lambda: write_part(path, framed, 0, torch.zeros(10)),
            "object": lambda: write_object(path, 1),
            "manifest": lambda: write_manifest(path.parent, manifest()),
        }[write]()


def test_a_directory_in_the_way_is_reported(tmp_path):
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(StorageError, match=r"a\.pt: Is a directory"):
        write_object(tmp_path / "a.pt", 1)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_modes_follow_the_umask(tmp_path, umask):
    previous = os.umask(umask)
    try:
        write_whole(tmp_path / "a.pt", torch.zeros(3))
        write_object(tmp_path / "b.pt", 1)
        write_manifest(tmp_path, manifest())
    finally:
        os.umask(previous)
    assert {os.stat(path).st_mode & 0o777 for path in tmp_path.iterdir()} == {0o666 & ~umask}


# ---- verifying


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as stream:
        stream.seek(bit // 8)
        byte = stream.read(1)[0]
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))


def test_a_flipped_bit_is_found_in_any_byte(tmp_path):
    path = tmp_path / "a.pt"
    record = write_whole(path, torch.randn(5, 4), cat_dim=0)
    for byte in {*range(0, record.nbytes, 19), *range(record.payload_offset - 9, record.payload_offset + 99)}:
        bit = 8 * byte + byte % 7
        flip(path, bit)
        with pytest.raises(StorageError, match=r"a\.pt is damaged"):
            verify_file(path, record)
        flip(path, bit)
    verify_file(path, record)


def test_the_damaged_block_is_named(tmp_path):
    path = tmp_path / "a.pt"
    record = write_whole(path, torch.zeros(BLOCK_BYTES // 4 * 2 + 5))
    begin = record.payload_offset + BLOCK_BYTES
    flip(path, 8 * (begin + 77))
    with pytest.raises(StorageError, match=rf"a\.pt is damaged: .*bytes \[{begin}, {begin + BLOCK_BYTES}\)"):
        verify_file(path, record)


def test_missing_truncated_and_overlong_files_are_found(tmp_path):
    path = tmp_path / "a.pt"
    record = write_whole(path, torch.randn(50))
    with open(path, "ab") as stream:
        stream.write(b"x")
    with pytest.raises(StorageError, match=r"a\.pt is too long"):
        verify_file(path, record)
    os.truncate(path, record.nbytes - 1)
    with pytest.raises(StorageError, match=r"a\.pt is truncated"):
        verify_file(path, record)
    path.unlink()
    with pytest.raises(StorageError, match=r"cannot read .*a\.pt: No such file"):
        verify_file(path, record)


def test_a_file_of_another_export_is_found(tmp_path):
    record = write_whole(tmp_path / "a.pt", torch.zeros(50))
    write_whole(tmp_path / "a.pt", torch.ones(50))
    with pytest.raises(StorageError, match=r"a\.pt is damaged"):
        verify_file(tmp_path / "a.pt", record)


def test_records_pass_through_json(tmp_path):
    records = [
        write_whole(tmp_path / "a.pt", torch.zeros(50)),
        write_whole(tmp_path / "b.pt", torch.zeros(0, 3, dtype=torch.int64)),
        FileRecord.of_object(write_object(tmp_path / "c.pt", {})),
    ]
    for record in records:
        assert FileRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_malformed_record_is_refused(tmp_path):
    good = write_whole(tmp_path / "a.pt", torch.zeros(50)).to_json()
    for broken in (
        {key: value for key, value in good.items() if key != "extents"},
        {**good, "extents": [[0, 100, [1]]]},  # of 200 bytes
        {**good, "extents": [[0, 200, []]]},
        {**good, "extents": 5},
        {**good, "surprise": 1},
    ):
        with pytest.raises(StorageError, match=r"a\.pt"):
            FileRecord.from_json(broken)


def test_extents_with_a_gap_an_overlap_or_of_two_files_make_no_record(tmp_path):
    framed = frame((10,), torch.float32, {})
    a, b = (write_part(tmp_path / "a.pt", framed, start, torch.zeros(5), tmp_path) for start in (0, 20))
    FileRecord.of_tensor(framed, [b, a])
    for wrong in (
        [a],
        [b],
        [a, a, b],
        [a, dataclasses.replace(b, start=16)],
        [a, dataclasses.replace(b, path="b.pt")],
        [],
    ):
        with pytest.raises(StorageError):
            FileRecord.of_tensor(framed, wrong)


# ---- reading


@st.composite
def views(draw) -> torch.Tensor:
    """A tensor as the stock converter may save it: any view of a larger storage."""
    base = torch.arange(draw(st.integers(1, 400)), dtype=draw(st.sampled_from([torch.float32, torch.int16])))
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    room = base.numel() - 1
    strides = []
    for size in shape:
        stride = draw(st.integers(0, room // (size - 1))) if size > 1 else draw(st.integers(0, 9))
        strides.append(stride)
        room -= (size - 1) * stride
    return base.as_strided(shape, strides, draw(st.integers(0, room)))


@given(view=views(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_ranges_of_any_view_are_read_in_logical_order(tmp_path_factory, view, data):
    path = tmp_path_factory.getbasetemp() / "view.pt"
    torch.save({"param": view}, path)
    file = open_tensor(path)
    assert (file.shape, file.dtype, file.strides) == (tuple(view.shape), view.dtype, view.stride())
    start = data.draw(st.integers(0, view.numel()))
    numel = data.draw(st.integers(0, view.numel() - start))
    out = file.read(start, numel, torch.empty(numel, dtype=view.dtype))
    assert torch.equal(out, view.reshape(-1)[start : start + numel])


def test_a_vocabulary_cut_by_the_stock_converter_is_one_contiguous_read(tmp_path):
    padded = torch.randn(256, 16)
    torch.save({"param": padded[:250], "vocab_tensor": True}, tmp_path / "fp32.pt")
    file = open_tensor(tmp_path / "fp32.pt")
    assert file.contiguous and file.numel == 250 * 16 and file.metadata == {"vocab_tensor": True}
    assert torch.equal(file.read(249 * 16, 16, torch.empty(16)), padded[249])


def test_only_the_bytes_asked_for_are_read(tmp_path):
    tensor = torch.randn(100, 100)
    write_whole(tmp_path / "a.pt", tensor)
    file = open_tensor(tmp_path / "a.pt")
    with payload_counted() as asked:
        for start, numel in ((5, 20), (9000, 3), (0, 2), (40, 0)):
            assert torch.equal(file.read(start, numel, torch.empty(numel)), tensor.view(-1)[start : start + numel])
    assert asked() == 100


def test_reads_outside_the_tensor_or_into_the_wrong_place_are_refused(tmp_path):
    write_whole(tmp_path / "a.pt", torch.zeros(10))
    file = open_tensor(tmp_path / "a.pt")
    for start, numel, out in (
        (5, 6, torch.empty(6)),
        (-1, 2, torch.empty(2)),
        (0, 2, torch.empty(3)),
        (0, 2, torch.empty(2).half()),
    ):
        with pytest.raises(ValueError, match=r"a\.pt"):
            file.read(start, numel, out)


def test_a_file_that_shrinks_after_its_header_was_read_is_reported(tmp_path):
    write_whole(tmp_path / "a.pt", torch.zeros(1000))
    file = open_tensor(tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", file.payload_offset + 400)
    assert file.read(0, 100, torch.empty(100)).count_nonzero() == 0
    with pytest.raises(StorageError, match=r"a\.pt is truncated"):
        file.read(0, 101, torch.empty(101))
    (tmp_path / "a.pt").unlink()
    with pytest.raises(StorageError, match=r"cannot read .*a\.pt"):
        file.read(0, 1, torch.empty(1))


def test_a_file_truncated_anywhere_is_refused_by_name(tmp_path):
    path = tmp_path / "a.pt"
    record = write_whole(path, torch.randn(30), cat_dim=0)
    for size in range(record.nbytes - 1, -1, -97):
        os.truncate(path, size)
        with pytest.raises(StorageError, match=r"a\.pt"):
            open_tensor(path)


def legacy(path: Path) -> None:
    torch.save({"param": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)


def plain_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.mkdir(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"# not a checkpoint\n"),
        lambda path: path.write_bytes(pickle.dumps({"param": 1}, protocol=2)),
        plain_zip,
        legacy,
        lambda path: torch.save([torch.zeros(3)], path),
        lambda path: torch.save({"weight": torch.zeros(3)}, path),
        lambda path: torch.save({"param": 3}, path),
        lambda path: torch.save({"param": torch.zeros(3), "step": torch.zeros(3)}, path),
        lambda path: torch.save({"param": torch.zeros(3, 3).to_sparse()}, path),
    ],
    ids=[
        *("missing", "directory", "empty", "text", "pickle", "zip"),
        *("legacy", "list", "keys", "scalar", "tensors", "sparse"),
    ],
)
def test_foreign_files_are_refused_by_name(tmp_path, make):
    make(tmp_path / "foreign.pt")
    with pytest.raises(StorageError, match=r"foreign\.pt"):
        open_tensor(tmp_path / "foreign.pt")


class Bomb:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("look", [open_tensor, read_object])
def test_looking_at_a_file_never_runs_its_code(tmp_path, look):
    torch.save({"param": torch.zeros(3), "cat_dim": Bomb(f"touch {tmp_path}/ran")}, tmp_path / "bomb.pt")
    with pytest.raises(StorageError, match=r"bomb\.pt needs posix\.system to load, which was not run"):
        look(tmp_path / "bomb.pt")
    assert not (tmp_path / "ran").exists()


def test_an_object_may_hold_the_classes_that_its_reader_allows_and_no_others(tmp_path):
    write_object(tmp_path / "optimizer_state.pt", {"loss_scaler": LossScaler(scale=128.0)})
    with pytest.raises(StorageError, match=r"optimizer_state\.pt needs deepspeed\..*LossScaler to load"):
        read_object(tmp_path / "optimizer_state.pt")
    assert read_object(tmp_path / "optimizer_state.pt", PICKLED_CLASSES)["loss_scaler"].cur_scale == 128.0
    assert LossScaler not in torch.serialization.get_safe_globals()


def test_stock_loader_reads_a_file_after_it_was_moved(tmp_path):
    write_whole(tmp_path / "a.pt", torch.ones(3))
    shutil.move(tmp_path / "a.pt", tmp_path / "exp_avg.pt")
    assert torch.load(tmp_path / "exp_avg.pt", mmap=True)["param"].tolist() == [1, 1, 1]
