# SPDX-License-Identifier: Apache-2.0
"""How a model's layers are cut over tensor-parallel ranks: one module per source of truth, and one that decides.

megatron_core.py       layers that describe themselves (sharded_state_dict)
autotp.py              DeepSpeed's tensor parallelism for Hugging Face models
megatron_deepspeed.py  layers of Megatron-DeepSpeed, by class and by probing their code
attributes.py          attributes of parameters: tensor_model_parallel, partition_dim
layers.py              all of these together, for one rank's model
patterns.py            the client's name patterns (universal_checkpoint_info); sub_params.py reads their SubparamShapes
resolve.py             one Rule per parameter out of all claims
"""
