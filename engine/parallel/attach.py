"""Puts kernels and sharing on a loaded family's denoisers, from outside: their own code stays that of one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from saggar.engine.attention.auto import Auto
from saggar.engine.attention.base import Backend, MaskKind, Need
from saggar.engine.attention.dispatch import Found, find_sites, install, share_linear
from saggar.engine.attention.select import choose
from saggar.engine.attention.site import Shared, Site, Streams
from saggar.engine.choices import AUTO, Choice, wish_of
from saggar.engine.errors import Unsupported
from saggar.engine.parallel.hooks import apply_plan
from saggar.engine.parallel.mesh import Mesh
from saggar.engine.parallel.plans import SequencePlan, matches


class Attachment:
    """What all denoisers of a rank have in common. `masks`: by role, what masks its sites get. `defaults`: the
    platform's kernels, the best first.
    """

    def __init__(
        self,
        choices: Mapping[str, Choice],
        defaults: Sequence[str],
        mesh: Mesh,
        plan: SequencePlan | None,
        masks: Mapping[str, MaskKind],
    ) -> None:
        self._choices = choices
        self._defaults = defaults
        self._mesh = mesh
        self._plan = plan
        self._masks = masks
        self._used: dict[str, Backend] = {}
        self._autos: dict[Need, Auto] = {}

    def put_on(self, denoiser: torch.nn.Module) -> None:
        """Unsupported: a choice that cannot serve a site, a site that cannot be reached, a plan that does not
        apply.
        """
        sequence = self._mesh.sp.size > 1
        plan = self._plan.of(denoiser) if sequence and self._plan is not None else None
        streams = Streams()
        for found in find_sites(denoiser):
            if not found.reachable:
                if plan is not None or wish_of(found.role, self._choices) is not None:
                    kind = type(found.module.processor).__name__
                    raise Unsupported(
                        f"attention: {found.name} computes by itself ({kind}) and cannot be told how"
                    )
                continue
            names = () if plan is None else _streams_of(plan, found.name)
            shared = Shared(self._mesh, streams, names) if names else None
            backend = self._kernel(found, denoiser, shared is not None and self._mesh.ring.size > 1)
            install(found, Site(found.name, found.role, backend, shared))
        if plan is not None:
            share_linear(denoiser, self._mesh.sp)
            apply_plan(denoiser, plan, self._mesh.sp, streams)

    @property
    def autos(self) -> list[Auto]:
        """Those kernels that are to be chosen by trying."""
        return list(self._autos.values())

    @property
    def numerics(self) -> str:
        """The kernels, and what of the degrees changes results: `torch_sdpa`, `cross=torch_sdpa,self=cudnn/ring2`."""
        names = {role: backend.label for role, backend in sorted(self._used.items())}
        kernels = ",".join(f"{role}={name}" for role, name in names.items())
        if len(set(names.values())) == 1:
            kernels = next(iter(names.values()))
        parts = [f"{name}{getattr(self._mesh, name).size}" for name in ("ulysses", "ring")]
        return "/".join(
            [kernels or "own", *(part for part in parts if not part.endswith("s1") and part != "ring1")]
        )

    def _kernel(self, found: Found, denoiser: torch.nn.Module, lse: bool) -> Backend:
        weight = next(denoiser.parameters())
        mask = self._masks.get(found.role, "none")
        need = Need(weight.device.type, weight.dtype, found.head_dim, mask, lse)
        wish = wish_of(found.role, self._choices)
        if wish is not None and wish.backend == AUTO:
            return self._auto(found, need)
        backend = choose(found.name, found.role, need, self._choices, self._defaults)
        return self._used.setdefault(found.role, backend)

    def _auto(self, found: Found, need: Need) -> Backend:
        # It refuses what no kernel bears, and under Ring what has no log-sum-exp.
        usual = choose(found.name, found.role, need, {}, self._defaults)
        if need not in self._autos:
            self._autos[need] = Auto.beside(usual, need)
        return self._used.setdefault(found.role, self._autos[need])


def _streams_of(plan: SequencePlan, name: str) -> tuple[str, ...]:
    for pattern, names in plan.sites.items():
        if matches(pattern, name):
            return names
    raise Unsupported(f"the sequence plan does not apply: it says nothing of the attention {name}")
