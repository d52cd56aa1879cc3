"""The ranks' communication library: torch.distributed over gloo or NCCL, for a group of more than one rank whose
family uses torch. They meet at a store that rank 0 opens on a free port of node 0; the others hear of it by their link.

Ranks that share work speak through the groups of the world's mesh; those that only do the same never speak.
"""

from __future__ import annotations

import importlib
from types import TracebackType
from typing import Any

from saggar.engine.config import EngineConfig
from saggar.engine.errors import LoadError
from saggar.engine.models.registry import open_family
from saggar.engine.parallel.mesh import Mesh
from saggar.engine.worker.team import Team

_HERE = "127.0.0.1"


class World:
    """A context manager: the default process group of this rank's process, where one is needed, and the `mesh` of
    those that share its work.
    """

    def __init__(self, config: EngineConfig, team: Team) -> None:
        self._config = config
        self._team = team
        self._joined = False
        self.mesh = Mesh.alone()

    def __enter__(self) -> World:
        """LoadError: the ranks do not find each other."""
        if self._config.ranks > 1 and open_family(self._config.model).uses_torch:
            self._join()
            self._joined = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._joined and kind is None:
            import torch.distributed as dist

            dist.destroy_process_group()

    def _join(self) -> None:
        import torch
        from saggar.engine.platform.select import place

        dist: Any = importlib.import_module("torch.distributed")  # its stores are not in its types
        placement, platform = place(self._config, self._team.slot)
        size, nodes = self._config.ranks, self._config.nodes
        host = nodes.host if nodes is not None else _HERE
        if self._team.leads:
            store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            self._team.tell(store.port)
        else:
            port = self._team.hear()
            assert isinstance(port, int), port
            store = dist.TCPStore(host, port, size, is_master=False)
        dist.init_process_group(platform.communication, store=store, rank=self._team.rank, world_size=size)
        here = torch.ones(1, device=placement.device)
        dist.all_reduce(here)
        if int(here.item()) != size:
            raise LoadError(f"{int(here.item())} of {size} ranks found each other")
        self.mesh = Mesh.of(self._config.degrees, self._team.rank, lambda ranks: dist.new_group(list(ranks)))
