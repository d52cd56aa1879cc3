"""Sites of a test's own: their servers may be killed, frozen and filled up without harm to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.faulty_s3 import FaultyS3
from tests.support.site import Site
from tests.support.weed import S3Server

FaultySite = tuple[Site, FaultyS3]
MakeSite = Callable[..., Site]


@pytest.fixture
def make_site(tmp_path: Path) -> Iterator[MakeSite]:
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(Site(tmp_path, **how))


@pytest.fixture
def site(make_site: MakeSite) -> Site:
    return make_site()


@pytest.fixture
def s3_site(make_site: MakeSite, s3_server: S3Server) -> Iterator[Site]:
    yield make_site(s3=s3_server)
    if s3_server.pid is None:
        s3_server.start()


@pytest.fixture
def faulty_site(make_site: MakeSite, s3_server: S3Server) -> Iterator[FaultySite]:
    """A site whose store is behind a proxy, and that proxy."""
    with FaultyS3(s3_server) as proxy:
        yield make_site(s3=proxy), proxy
