# SPDX-License-Identifier: Apache-2.0
"""Megatron-DeepSpeed's two names for each parameter, as its gpt_model.py and language_model.py give them."""

from __future__ import annotations

import pytest

from megads_ucp.integrations.megatron_names import bridge, scheme

LAYER = ("input_layernorm.weight", "self_attention.query_key_value.weight", "self_attention.dense.bias")
LAYERS = 11  # two digits: places are numbers, not texts

MODULES = {
    "embedding.word_embeddings.weight": "{embed}word_embeddings.weight",
    "embedding.position_embeddings.weight": "{embed}position_embeddings.weight",
    **{f"encoder.layers.{n}.{rest}": f"{2 + n}.{rest}" for n in range(LAYERS) for rest in LAYER},
    "encoder.final_layernorm.weight": f"{2 + LAYERS}.weight",
    "encoder.final_layernorm.bias": f"{2 + LAYERS}.bias",
}
TIED = {f"language_model.{module}": place.format(embed="tied_modules.embed.") for module, place in MODULES.items()}
UNTIED = {
    **{f"language_model.{module}": place.format(embed="1.") for module, place in MODULES.items()},
    "language_model.output_layer.weight": f"{3 + LAYERS}.lm_head.weight",
}


@pytest.mark.parametrize("names", [TIED, UNTIED], ids=["tied", "untied"])
def test_either_scheme_finds_its_parameters_under_the_other(names: dict[str, str]):
    back = {place: module for module, place in names.items()}

    assert bridge(list(names), list(back)) == names
    assert bridge(list(back), list(names)) == back


def test_nothing_is_renamed_within_a_scheme_or_outside_of_both():
    for names in (list(TIED), list(TIED.values()), ["layers.0.weight", "0.weight"]):
        assert bridge(names, names) == {}
    assert bridge(["0.weight", "layers.1.bias"], list(TIED)) == {}
    assert [scheme(n) for n in (TIED, TIED.values(), ["0.weight"])] == ["without", "with", None]


def test_layers_are_counted_from_the_first_that_has_an_attention():
    """A fork may put something before the layers, or between the last of them and the norm."""
    places = {"language_model.encoder.layers.0.self_attention.dense.bias": "5.self_attention.dense.bias"}
    more = {
        "language_model.encoder.layers.1.self_attention.dense.bias": "6.self_attention.dense.bias",
        "language_model.encoder.layers.1.mlp.dense_h_to_4h.weight": "6.mlp.dense_h_to_4h.weight",
        "language_model.encoder.final_layernorm.weight": "9.weight",
    }

    assert bridge(list(places | more), list((places | more).values())) == places | more


def test_a_parameter_that_the_other_scheme_does_not_have_is_left_out():
    found = bridge([*UNTIED, "language_model.pooler.dense.weight"], list(TIED.values()))

    assert set(UNTIED) - set(found) == {"language_model.output_layer.weight"}
