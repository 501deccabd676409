# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints for DeepSpeed, written during training."""
