"""A web backend pays for what it uses: importing the package is cheap."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ["torch", "diffusers", "transformers", "numpy", "boto3", "celery", "kombu", "redis", "PIL"]
OTHERS = ["saggar.engine", "saggar.storage", "saggar.workers"]


def test_importing_jobs_brings_nothing_heavy() -> None:
    code = "import saggar.jobs, sys; print(len(sys.modules), *sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    count, *modules = out.stdout.split()
    assert not set(modules) & {*HEAVY, *OTHERS}
    assert int(count) < 400  # it was 249 on Python 3.11


def test_the_public_names_exist() -> None:
    import saggar.jobs

    for name in saggar.jobs.__all__:
        assert getattr(saggar.jobs, name) is not None
    assert saggar.jobs.__all__ == sorted(
        saggar.jobs.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n)
    )
