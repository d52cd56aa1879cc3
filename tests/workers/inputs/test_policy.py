"""What a worker may read: by URL, by address, by folder."""

from __future__ import annotations

import pytest
from saggar.workers.inputs.addresses import allowed_address
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.policy import Policy, Source

POLICY = Policy.make(
    "s3://results/site",
    ["https://cdn.example", "https://*.photos.example:8443/public", "s3://photos/in", "file:///srv/in%20put"],
)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://results/site/uploads/a.png",
        "s3://photos/in/deep/a.png",
        "https://cdn.example/a.png?sig=1%2F2",
        "https://CDN.example:443/a/b",
        "https://a.photos.example:8443/public/x",
        "https://a.b.photos.example:8443/%70ublic/x",
        "https://a.b.photos.example:8443/public/50%25;v=1..2/%2541.png",
        "file:///srv/in%20put/a.png",
    ],
)
def test_what_is_named_is_allowed(uri: str) -> None:
    POLICY.find(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "file:///etc/passwd",
        "file:///srv/in%20put",
        "file:///srv/in%20put/../secret",
        "file:///srv/in%20put/%2e%2e/secret",
        "file:///srv/in%20put2/a",
        "file://localhost/srv/in%20put/a",
        "file:///srv/in%20put/a%00.png",
        "s3://results/site/job/a1/0.png",
        "s3://results/other/uploads/a",
        "s3://results/site/uploads/../job/x",
        "s3://photos/inner/a",
        "s3://other/in/a",
        "s3:///in/a",
        "http://cdn.example/a.png",
        "ftp://cdn.example/a.png",
        "gopher://cdn.example/a.png",
        "https://cdn.example:444/a.png",
        "https://cdn.example",
        "https://cdn.example.evil.example/a.png",
        "https://cdn.example@evil.example/a.png",
        "https://user:word@cdn.example/a.png",
        "https://photos.example:8443/public/x",
        "https://evilphotos.example:8443/public/x",
        "https://a.photos.example:8443/private/x",
        "https://a.photos.example:8443/public/%2e%2e/private",
        "https://a.photos.example:8443/public/..%2fprivate",
        "https://a.photos.example:8443/public%5c..%5cprivate",
        "https://a.photos.example:8443/public/%252e%252e/private",
        "https://a.photos.example:8443/public/%25252e%25252e/private",
        "https://a.photos.example:8443/public/..;/private",
        "https://a.photos.example:8443/public/..;x=1/private",
        "https://a.photos.example:8443/public/%2e%2e%3b/private",
        "https://a.photos.example:8443/public/%" + "25" * 9 + "41",
        f"https://{'a' * 64}.photos.example:8443/public/x",
        f"https://{'a.' * 130}photos.example:8443/public/x",
        "https://a..photos.example:8443/public/x",
        "https://cdn.example:port/a",
        "https://cdn.example/a b",
        "https://cdn.example\\@evil.example/a",
        "data:image/png;base64,AAAA",
        "",
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(uri: str) -> None:
    with pytest.raises(BadInput) as refused:
        POLICY.find(uri)
    assert refused.value.allowed.startswith("s3://results/site/uploads/, https://cdn.example/, ")
    assert "sig" not in refused.value.message and "word" not in refused.value.message


@pytest.mark.parametrize(
    "text", ["http://cdn.example", "cdn.example", "s3://", "file://host/x", "https://a/?b", "/x"]
)
def test_a_source_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no source of input files"):
        Source.parse(text)


@pytest.mark.parametrize(
    ("address", "public", "private"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1::1", True, True),
        ("127.0.0.1", False, True),
        ("::1", False, True),
        ("10.1.2.3", False, True),
        ("192.168.0.1", False, True),
        ("172.20.0.1", False, True),
        ("fd00::1", False, True),
        ("::ffff:127.0.0.1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("64:ff9b::7f00:1", False, True),
        ("2002:7f00:1::", False, True),
        ("100.64.0.1", False, False),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("fe80::1", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("255.255.255.255", False, False),
        ("::127.0.0.1", False, False),
        ("::ffff:0:127.0.0.1", False, False),
        ("64:ff9b:1::7f00:1", False, False),
        ("fec0::1", False, False),
        ("5f00::1", False, False),
        ("fd00:ec2::254", False, False),
        ("fd20:ce::254", False, False),
        ("168.63.129.16", False, False),
        ("192.0.0.192", False, False),
        ("::ffff:168.63.129.16", False, False),
    ],
)
def test_addresses(address: str, public: bool, private: bool) -> None:
    for named, may in ((False, public), (True, private)):
        if may:
            assert allowed_address("h", [address], private=named) == address
        else:
            with pytest.raises(BadInput, match="has no address that may be connected to"):
                allowed_address("h", [address], private=named)


def test_the_first_allowed_address_is_taken() -> None:
    assert allowed_address("h", ["127.0.0.1", "93.184.216.34"], private=False) == "93.184.216.34"
