"""What the fork server imports, once for all ranks: see forked.py."""

import diffusers
import torch
from saggar.engine.models.registry import families
from saggar.engine.worker import process

torch.set_num_threads(1)  # no thread of OpenMP's is there when it forks
IMPORTED = [process, *(getattr(diffusers, name) for name in families() if hasattr(diffusers, name))]
