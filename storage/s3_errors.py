"""What S3 answers, in storage's words: what passes, what is final, and what is no answer of S3's at all.

5xx, 408, 429 and failed connections are worth another try; every other refusal is final.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from saggar.storage.errors import NotFound, StorageDenied, StorageRefused, StorageUnavailable

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef

NO_BUCKET = "there is no such bucket; make it, or correct the name"
_PASSING_STATUS = {408, 429}
_PASSING_CODES = {
    "RequestTimeout",
    "SlowDown",
    "Throttling",
    "ConditionalRequestConflict",
    "OperationAborted",
}
_NEVER = 501  # "not implemented": the one 5xx that will not pass
_EXPIRED = "its session token has expired: give this process new credentials"
_WRONG_KEYS = "check the access key and the secret key"
_CLOCK = "set this machine's clock, by NTP for instance"
_DENIED = {
    "AccountProblem": "ask whoever runs the store",
    "ExpiredToken": _EXPIRED,
    "InvalidAccessKeyId": _WRONG_KEYS,
    "InvalidSecurity": _WRONG_KEYS,
    "InvalidToken": _EXPIRED,
    "NotSignedUp": "ask whoever runs the store",
    "RequestExpired": _CLOCK,
    "RequestTimeTooSkewed": _CLOCK,
    "TokenRefreshRequired": _EXPIRED,
}
"""Refusals of whoever asks, and what to do about them."""
_SIGNATURE = "SignatureDoesNotMatch"  # whoever asks, or one key or bucket that something in between rewrites
_REWRITTEN = f"{_WRONG_KEYS}, and whether a gateway changes such requests"
_DENIED_STATUS = {401, 403}
_RIGHTS = "the credentials lack a permission, or a policy of the bucket forbids it"
_ELSEWHERE = (
    "the store sends the request elsewhere: set SAGGAR_S3_ENDPOINT and SAGGAR_S3_REGION to the bucket's"
)
_LONGEST_REASON = 300
_MD5 = re.compile(r"[0-9a-f]{32}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """boto3's errors in storage's words."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as boto

    try:
        yield
    except boto.ClientError as error:
        raise _refusal(what, error) from error
    except (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError) as error:
        raise StorageUnavailable(f"{what}: {error}") from error
    except RecursionError as error:  # botocore follows a redirect without a region again and again
        raise StorageRefused(f"{what}: {_ELSEWHERE}") from error
    except Boto3Error as error:  # the transfer manager hides the client's error in one of its own
        cause = error.__context__
        if isinstance(cause, boto.ClientError):
            raise _refusal(what, cause) from error
        raise StorageUnavailable(f"{what}: {error}") from error
    except (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.MetadataRetrievalError,
        boto.TokenRetrievalError,
    ) as error:
        raise StorageDenied(f"{what}: {error}") from error
    except boto.BotoCoreError as error:
        raise StorageRefused(f"{what}: {error}") from error


def _refusal(what: str, error: ClientError) -> NotFound | StorageUnavailable | StorageRefused:
    code, status = error.response.get("Error", {}).get("Code", ""), status_of(error)
    if code == "NoSuchBucket":
        return StorageRefused(f"{what}: {NO_BUCKET}", code=code, status=status)
    if status == 404 and not code:
        return no_answer(what)
    if status == 404:
        return NotFound(what)
    said = f"{what}: {' '.join(str(error).split())[:_LONGEST_REASON] if code else f'HTTP status {status}'}"
    passing = status >= 500 or status in _PASSING_STATUS or code in _PASSING_CODES
    if passing and status != _NEVER:
        return StorageUnavailable(said)
    if code in _DENIED:
        return StorageDenied(f"{said}; {_DENIED[code]}", code=code, status=status)
    return StorageRefused(f"{said}{_hint(code, status)}", code=code, status=status)


def _hint(code: str, status: int) -> str:
    if code == _SIGNATURE:
        return f"; {_REWRITTEN}"
    if 300 <= status < 400:
        return f"; {_ELSEWHERE}"
    return f"; {_RIGHTS}" if status in _DENIED_STATUS else ""


def etag_of(what: str, answer: Mapping[str, Any]) -> str:
    """The etag of an answer. StorageUnavailable: it is a page of something in between, or an error under status 200."""
    if "ETag" not in answer:
        raise no_answer(what)
    return str(answer["ETag"]).strip('"')


def no_answer(what: str) -> StorageUnavailable:
    """What is to be raised then."""
    return StorageUnavailable(
        f"{what}: not the answer of an S3 server: is there a proxy or a gateway before it?"
    )


def status_of(error: ClientError) -> int:
    """The HTTP status; 0 when there is none."""
    return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)


def md5_of(found: HeadObjectOutputTypeDef) -> str | None:
    """An etag is the content's MD5 unless the object came in parts or the server encrypts it with a key of its own."""
    etag = found["ETag"].strip('"')
    encrypted = "kms" in found.get("ServerSideEncryption", "") or "SSECustomerAlgorithm" in found
    return etag if _MD5.fullmatch(etag) and not encrypted else None
