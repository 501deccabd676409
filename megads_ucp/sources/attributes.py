# SPDX-License-Identifier: Apache-2.0
"""Rules from parameter attributes: ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``.

Megatron's layers set them (megatron/core/tensor_parallel/layers.py), at any TP degree.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from megads_ucp.errors import LayoutError
from megads_ucp.layout.rule import Rule

ATTRIBUTES = "Megatron attributes (tensor_model_parallel, partition_dim)"


def rules_from_attributes(parameters: Mapping[str, nn.Parameter], tp_degree: int) -> dict[str, Rule]:
    """Rules of all parameters whose attributes describe their layout; empty for a model without split parameters.

    ``partition_stride`` s > 1 means s equal sub-parameters, each split (``_initialize_affine_weight_cpu`` in
    megatron/core/tensor_parallel/layers.py deals chunk r of each of them to rank r). megatron-core 0.16 sets 2 for
    SwiGLU; Megatron-DeepSpeed and older cores leave it at 1, so other sources may refine a plain split from here.

    ``tensor_model_parallel`` False counts as "replicated" only in a model that has some split parameter: under
    ``perform_initialization=False`` Megatron leaves split weights at that default. True without a ``partition_dim``
    means nothing: AutoTP sets just that (deepspeed/module_inject/layers.py).

    Raises:
        LayoutError: attributes do not fit the parameter's shape.
    """
    split = {
        name: _rule_from_attributes(name, parameter, tp_degree)
        for name, parameter in parameters.items()
        if partition_dim(parameter) is not None
    }
    if not split:
        return {}
    whole = {
        name: Rule("replicated", ATTRIBUTES)
        for name, parameter in parameters.items()
        if getattr(parameter, "tensor_model_parallel", None) is False
    }
    return {**whole, **split}


def partition_dim(tensor: torch.Tensor) -> int | None:
    """The dimension along which Megatron's attributes say that the tensor is split; None if they do not."""
    dim: int | None = getattr(tensor, "partition_dim", None)
    return dim if getattr(tensor, "tensor_model_parallel", False) and dim is not None and dim >= 0 else None


def _rule_from_attributes(name: str, parameter: nn.Parameter, tp_degree: int) -> Rule:
    dim = partition_dim(parameter)
    parts = getattr(parameter, "partition_stride", 1)
    if dim is None or dim >= parameter.ndim or parts < 1 or parameter.shape[dim] % parts:
        raise LayoutError(
            f"{name}: its attributes say partition_dim {dim} and partition_stride {parts}, which its shape "
            f"{tuple(parameter.shape)} does not allow. Correct them where they are set."
        )
    if parts == 1:
        return Rule("split", ATTRIBUTES, dim=dim)
    part = parameter.shape[dim] // parts * tp_degree
    return Rule("split", ATTRIBUTES, dim=dim, sub_sizes=(part,) * parts, style="n_sub_params")
