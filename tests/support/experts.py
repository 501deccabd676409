# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, for two ranks and more."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


class Experts(nn.Module):
    """A mixture of experts with the parameter groups that DeepSpeed wants for one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 8)
        self.moe = MoE(8, nn.Linear(8, 8), num_experts=2, ep_size=2, k=1)
        self.outer = nn.Linear(8, 5)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden, _, _ = self.moe(self.inner(inputs))
        return nn.functional.mse_loss(self.outer(hidden), targets)

    def groups(self) -> list[dict[str, Any]]:
        return split_params_into_different_moe_groups_for_optimizer({"params": list(self.parameters()), "name": "all"})
