"""What a plug-in's family is written with: docs/adding-a-model.md. Imports no torch.

What needs torch is in `saggar.engine.plugin_torch`, to be imported inside the verbs alone: the engine's process asks
a family for its schema and its batch keys, and stays free of torch.
"""

from saggar.engine.cache.prompt import Encoded
from saggar.engine.errors import InvalidRequest, LoadError, Unsupported
from saggar.engine.models.base import Family
from saggar.engine.models.packages import need
from saggar.engine.models.registry import serves
from saggar.engine.models.source.checkpoint import Checkpoint
from saggar.engine.models.source.files import needed
from saggar.engine.models.state import RequestState, Row
from saggar.engine.models.torch_family import TorchFamily, per_text, text_length, vae_factor
from saggar.engine.params import Narrowing
from saggar.engine.platform.base import Placement
from saggar.engine.request import Request, TextCut

__all__ = [
    "Checkpoint",
    "Encoded",
    "Family",
    "InvalidRequest",
    "LoadError",
    "Narrowing",
    "Placement",
    "Request",
    "RequestState",
    "Row",
    "TextCut",
    "TorchFamily",
    "Unsupported",
    "need",
    "needed",
    "per_text",
    "serves",
    "text_length",
    "vae_factor",
]
