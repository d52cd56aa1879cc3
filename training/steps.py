"""One training step as something to call; on a GPU it is recorded once and replayed.

The model is so small that launching a step's two thousand kernels takes longer than running them; a CUDA graph
launches them all at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[], Tensor]
WARM_UPS = 3  # steps before a recording: they compile, tune and allocate


class Steps:
    """AdamW without decay (this model is meant to remember), clipped gradients, and averaged weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.live: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        self.kept = [p.detach().clone() for p in self.live]
        self.decay = decay
        self.on_gpu = self.live[0].is_cuda
        # A recorded step reads its rate from the device, so that the rate can change between replays.
        self.rate = torch.zeros((), device=self.live[0].device)
        first: float | Tensor = self.rate if self.on_gpu else 0.0
        self.optimizer = torch.optim.AdamW(
            self.live,
            lr=first,
            betas=(0.9, 0.98),
            weight_decay=0.0,
            fused=self.on_gpu,
            capturable=self.on_gpu,
        )

    def record(self, loss: Loss) -> Loss:
        """A callable that makes one whole step with ``loss`` and returns its value, valid until the next call."""
        if not self.on_gpu:
            return lambda: self._step(loss)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # at rate 0: the weights stay
                self._step(loss)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value = self._step(loss)

        def replay() -> Tensor:
            graph.replay()
            return value

        return replay

    def _step(self, loss: Loss) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)  # all recordings share one set of gradients
        value = loss()
        torch.autograd.backward(value)
        nn.utils.clip_grad_norm_(self.live, 1.0)
        self.optimizer.step()
        return value.detach()

    def set_rate(self, rate: float) -> None:
        """The learning rate of the coming steps."""
        self.rate.fill_(rate)
        if not self.on_gpu:
            self.optimizer.param_groups[0]["lr"] = rate

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Moves the averaged weights towards the live ones; short-sighted at first."""
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.kept, self.live, 1 - decay)

    @torch.no_grad()
    def settle(self) -> None:
        """Replaces the live weights by the averaged ones."""
        torch._foreach_copy_(self.live, self.kept)
