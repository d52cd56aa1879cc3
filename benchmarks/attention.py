"""Every attention kernel that is installed, by shape: its error against float32 and its speed, beside torch's own.

python -m benchmarks.attention [--device cpu|cuda] [--shapes flux-512 ...] [--repeats 10]

On a CPU the shapes are small and the dtype is float32; on a GPU they are those of full models, in bfloat16.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from statistics import median

import torch
from saggar.engine import EngineConfig, Unsupported
from saggar.engine.attention.base import Backend, Need
from saggar.engine.attention.select import backends, kernel
from saggar.engine.platform.select import place

from benchmarks.report import table


@dataclass(frozen=True)
class Shape:
    """[batch, tokens, heads, width]; `keys`: fewer of them, for cross-attention; `masked`: a tenth of the keys is."""

    batch: int
    tokens: int
    heads: int
    width: int
    keys: int | None = None
    masked: bool = False

    @property
    def operations(self) -> float:
        """Of both products."""
        return 4.0 * self.batch * self.tokens * (self.keys or self.tokens) * self.heads * self.width


FULL = {
    "flux-512": Shape(1, 1536, 24, 128),
    "flux-1024": Shape(1, 4608, 24, 128),
    "sd3-1024": Shape(2, 4429, 24, 64),
    "qwen-1024-masked": Shape(2, 4608, 24, 128, masked=True),
    "wan-480p": Shape(1, 32760, 12, 128),
    "pixart-cross": Shape(2, 4096, 16, 72, keys=300, masked=True),
}
SMALL = {
    "self": Shape(1, 1024, 8, 64),
    "masked": Shape(2, 512, 8, 64, masked=True),
    "cross": Shape(2, 1024, 8, 72, keys=77, masked=True),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    placement, platform = place(EngineConfig(model="any", device=options.device), slot=0)
    assert placement.device is not None and placement.dtype is not None
    shapes = FULL if platform.kind == "cuda" else SMALL
    lines: list[tuple[object, ...]] = []
    for name in options.shapes or shapes:
        lines += measured(name, shapes[name], placement.device, placement.dtype, options.repeats)
    title = f"Attention kernels on {platform.kind}, {str(placement.dtype).removeprefix('torch.')}"
    header = ("shape", "kernel", "relative error to float32", "ms", "TFLOP/s", "ratio to torch_sdpa")
    print(table(title, header, lines))


def measured(
    name: str, shape: Shape, device: torch.device, dtype: torch.dtype, repeats: int
) -> list[tuple[object, ...]]:
    """A line a kernel; those that cannot serve the shape say why."""
    made = torch.Generator().manual_seed(0)
    sizes = [shape.tokens, shape.keys or shape.tokens, shape.keys or shape.tokens]
    q, k, v = (
        torch.randn(shape.batch, size, shape.heads, shape.width, generator=made).to(device, dtype)
        for size in sizes
    )
    mask = None
    if shape.masked:
        kept = torch.arange(sizes[1], device=device) < sizes[1] * 9 // 10
        mask = kept.expand(shape.batch, -1)[:, None, None]
    exact = kernel("torch_sdpa")().run(q.float(), k.float(), v.float(), mask)
    need = Need(device.type, dtype, shape.width, "keys" if shape.masked else "none")
    lines: list[tuple[object, ...]] = []
    usual = 0.0
    for backend_name in sorted(backends(), key=lambda one: one != "torch_sdpa"):
        try:
            backend = kernel(backend_name)()
            if (why := backend.traits.refusal(need)) is not None:
                raise Unsupported(why)
            out = backend.run(q, k, v, mask)
        except (Unsupported, RuntimeError) as error:
            lines.append((name, backend_name, str(error).splitlines()[0][:80], "", "", ""))
            continue
        wrong = float((out.float() - exact).norm() / exact.norm())
        seconds = timed(backend, (q, k, v), mask, repeats)
        usual = usual or seconds
        speed = shape.operations / seconds / 1e12
        ratio = f"{usual / seconds:.2f}"
        lines.append((name, backend_name, f"{wrong:.1e}", f"{seconds * 1e3:.3f}", f"{speed:.2f}", ratio))
    return lines


def timed(backend: Backend, qkv: tuple[torch.Tensor, ...], mask: torch.Tensor | None, repeats: int) -> float:
    """Median seconds of one call, after three that do not count. On a GPU ten are timed together, so that the way to
    the device is not.
    """
    together = 1 if qkv[0].device.type == "cpu" else 10
    seconds = []
    for _ in range(repeats + 3):
        settle(qkv[0].device)
        start = time.perf_counter()
        for _ in range(together):
            backend.run(qkv[0], qkv[1], qkv[2], mask)
        settle(qkv[0].device)
        seconds.append((time.perf_counter() - start) / together)
    return median(seconds[3:])


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
