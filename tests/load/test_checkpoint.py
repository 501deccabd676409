# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that is refused as a whole: damaged, not verifiable, not visible to all, or of the other kind."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch.distributed as dist

import megads_ucp
from megads_ucp.errors import StorageError, UniversalCheckpointError
from megads_ucp.load.checkpoint import Checkpoint
from tests.support import stock
from tests.support.degrees import export, gpt_case
from tests.support.ranks import run_ranks
from tests.support.runs import (
    TAG,
    UNIVERSAL,
    Recipe,
    tensors,
)
from tests.support.runs import export as export_recipe


@pytest.mark.slow
@pytest.mark.parametrize("together", ["never", "always"])
def test_a_verified_resume_at_another_degree(tmp_path: Path, together: str) -> None:
    """What a rank reads of a file, row by row, is checked with what it lies among; a flipped bit stops all ranks."""
    settings = {"universal_checkpoint_verify": True, "universal_checkpoint_read_together": together}
    case = gpt_case(layers=1)
    export(case, 1, 2, tmp_path, after=0)
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    file = tmp_path / UNIVERSAL / "zero" / name / "exp_avg.pt"

    def body(damaged: bool) -> str | None:
        megads_ucp.install(argparse.Namespace(**settings))
        engine = case.engine(2, resuming=True)
        if damaged:
            with pytest.raises(UniversalCheckpointError) as caught:
                engine.load_checkpoint(str(tmp_path))
            return str(caught.value)
        engine.load_checkpoint(str(tmp_path))
        case.assert_holds(engine, tmp_path / UNIVERSAL)
        return None

    assert run_ranks(body, 2, False) == [None, None]
    content = bytearray(file.read_bytes())
    # The last column of the last row, which only the last tensor-parallel rank wants.
    value = tensors(tmp_path / UNIVERSAL)[f"{name}/exp_avg"].numpy()
    content[content.index(value.tobytes()) + value.nbytes - 1] ^= 1
    file.write_bytes(content)
    first, other = run_ranks(body, 2, True)
    assert first == other and str(file) in first and "must not be used" in first


@pytest.mark.slow
def test_a_stock_directory_cannot_be_verified_and_the_error_says_so(tmp_path: Path) -> None:
    export_recipe(Recipe("fp32"), 2, tmp_path / "ours", after=0)
    stock.convert(tmp_path / "ours" / TAG, tmp_path / "stock" / UNIVERSAL)

    def body() -> str:
        megads_ucp.install(argparse.Namespace(universal_checkpoint_verify=True))
        engine = Recipe("fp32").engine(resuming=True)
        with pytest.raises(UniversalCheckpointError) as caught:
            engine.load_checkpoint(str(tmp_path / "stock"))
        return str(caught.value)

    first, other = run_ranks(body, 2)
    assert first == other and "manifest.json" in first and "verified" in first


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_does_not_see_is_refused_on_all(tmp_path: Path) -> None:
    """As a directory of some node's own."""
    recipe = Recipe("fp32")
    run_ranks(lambda: recipe.saved(tmp_path) and None, 2)

    def body() -> str:
        with pytest.raises(ValueError, match=r"nowhere/latest_universal does not exist: no .* has been exported there"):
            recipe.resumed(tmp_path / "nowhere")
        with pytest.raises(UniversalCheckpointError) as caught:
            recipe.resumed(tmp_path if dist.get_rank() == 0 else tmp_path / "elsewhere")
        return str(caught.value)

    for message in run_ranks(body, 2):
        assert "rank 1: " in message and str(tmp_path / "elsewhere" / UNIVERSAL) in message


def test_a_regular_checkpoint_is_refused_with_the_name_of_the_export_beside_it(tmp_path: Path) -> None:
    (tmp_path / "step5").mkdir()
    with pytest.raises(StorageError, match=r"not a universal checkpoint\.$"):
        Checkpoint(tmp_path / "step5")
    (tmp_path / "step5_universal").mkdir()
    with pytest.raises(StorageError, match="The one exported beside it is step5_universal"):
        Checkpoint(tmp_path / "step5")
