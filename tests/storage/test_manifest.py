# SPDX-License-Identifier: Apache-2.0
"""The manifest: what it says comes back, format version 1 stays as it is, and a bad one is named."""

from __future__ import annotations

import json

import pytest

from megads_ucp.errors import StorageError
from megads_ucp.storage import MANIFEST, FileRecord, read_manifest, write_manifest
from tests.support.manifests import SPLIT, manifest

VERSION_1 = (
    '{"format":"megads_ucp manifest","format_version":1,"run_id":"r1","created":"2026-01-01T00:00:00+00:00",'
    '"versions":{"torch":"2"},"topology":{"world":2},"run":{"base_optimizer":"Adam"},'
    '"parameters":{"w":{"shape":[10,3],"owned":true,"states":{"fp32":"float32","exp_avg":"bfloat16"},'
    '"layout":{"kind":"split","dim":0,"sub_sizes":[4,6],"vocabulary_size":null,"padded_rows":null,'
    '"qkv_order":{"order":"blocks","groups":1},"source":"test","shards":[[5,3],[5,3]]}},'
    '"embedding":{"shape":[61,9],"owned":false,"states":{"fp32":"float32"},'
    '"layout":{"kind":"split","dim":0,"sub_sizes":null,"vocabulary_size":61,"padded_rows":64,'
    '"qkv_order":null,"source":"test","shards":[[32,9],[32,9]]}}},'
    '"absent":["frozen"],'
    '"groups":[{"stage":0,"index":0,"parameters":["w"],"hyperparameters":{"lr":0.1,"betas":[0.9,0.99]}}],'
    '"files":[{"path":"zero/w/fp32.pt","nbytes":300,"payload_offset":64,"payload_bytes":120,"dtype":"float32",'
    '"shape":[10,3],"frame_crc32":7,"extents":[[0,120,[42]]]}]}'
)


def test_version_1_is_written_byte_for_byte(tmp_path):
    write_manifest(tmp_path, manifest())
    assert (tmp_path / MANIFEST).read_text() == VERSION_1


def test_a_manifest_comes_back_as_it_was_written(tmp_path):
    (tmp_path / MANIFEST).write_text(VERSION_1)
    found, written = read_manifest(tmp_path), manifest()
    assert dict(found.files) == written.files
    assert {**vars(found), "files": None} == {**vars(written), "files": None}


def test_a_manifest_of_version_0_1_is_read(tmp_path):
    content = json.loads(VERSION_1)
    del content["parameters"]["w"]["layout"]["qkv_order"], content["parameters"]["w"]["layout"]["padded_rows"]
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    layout = read_manifest(tmp_path).parameters["w"].layout
    assert layout.qkv_order is None and layout.sub_sizes == SPLIT.sub_sizes


def test_a_file_is_checked_when_it_is_looked_up(tmp_path):
    content = json.loads(VERSION_1)
    content["files"].append({"path": "zero/bad.pt"})
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    files = read_manifest(tmp_path).files
    assert isinstance(files["zero/w/fp32.pt"], FileRecord)
    assert "zero/bad.pt" in files and "zero/other.pt" not in files and len(files) == 2
    with pytest.raises(StorageError, match=r"record of 'zero/bad\.pt' is malformed"):
        files["zero/bad.pt"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"format": "megads_ucp manifest", "format_ver', "not JSON"),
        (b"[]", "written by something else"),
        (b'{"files": []}', "written by something else"),
        (b'{"format": "megads_ucp manifest", "format_version": 99}', "version 99.*install a newer"),
        (b'{"format": "megads_ucp manifest", "format_version": 1, "run_id": "r1"}', "malformed .*'created'"),
        (VERSION_1.replace('"shape":[61,9]', '"shape":7').encode(), "malformed .*restore it from a copy"),
    ],
)
def test_a_bad_manifest_is_named(tmp_path, content, complaint):
    if content is not None:
        (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(StorageError, match=rf"(?s){MANIFEST}.*") as caught:
        read_manifest(tmp_path)
    assert caught.match(complaint)
