# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints for DeepSpeed, written during training.

import megads_ucp
megads_ucp.add_arguments(parser)
megads_ucp.install(args)  # before deepspeed.initialize
"""

from megads_ucp.arguments import add_arguments
from megads_ucp.hooks import install, uninstall

__all__ = ["add_arguments", "install", "uninstall"]
__version__ = "0.1.0"
