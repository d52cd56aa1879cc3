"""Models by their id on the Hugging Face hub, `org/name` or `org/name@revision`: fetched once, then local.

huggingface_hub's own settings count: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only what the pipeline is
loaded from is fetched, never a pickle. No torch.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.client import PARTIAL_CONTENT
from pathlib import Path
from tempfile import TemporaryDirectory

from saggar.engine.errors import Unsupported
from saggar.engine.models.source.files import INDEX, SETTINGS, WEIGHTS, json_object, needed
from saggar.engine.models.source.outline import write_outline

log = logging.getLogger(__name__)

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_ID = re.compile(rf"(?P<name>{_PART}/{_PART})(@(?P<revision>[^@\s]+))?")
_SHOWN = 100


def split_id(model: str) -> tuple[str, str | None] | None:
    """Name and revision of a hub id; None: it has not the form of one."""
    match = _ID.fullmatch(model)
    if match is None or {".", "..", ""}.intersection((match["revision"] or "main").split("/")):
        return None  # a revision becomes a path in the cache
    return match["name"], match["revision"]


def fetch(model: str) -> Path:
    """The local folder of a hub id's files, which are fetched if they are not there.

    Unsupported: no such id or revision, no right to read it, or not cached and the hub out of reach.
    """
    with _in_our_words(model) as (name, revision):
        folder = _settings(name, revision)
        wanted = _wanted(name, folder)
        missing = [file for file in wanted if not (folder / file).exists()]
        if missing:
            size = sum(wanted[file] for file in missing) / 1e9
            log.info("fetching %s from the hub: %d files, %.1f GB", name, len(missing), size)
            _snapshot(name, folder.name, wanted)
            log.info("fetched %s to %s", name, folder)
    return folder


@contextmanager
def outlined_on_hub(model: str) -> Iterator[tuple[Path, bool]]:
    """As `fetch`, without weights that are not here. False: the folder is an outline (outline.py), gone at the end."""
    with TemporaryDirectory(prefix="saggar-outline-") as temporary:
        with _in_our_words(model) as (name, revision):
            snapshot = _settings(name, revision)
            folder = _outline(name, snapshot, Path(temporary))
        yield folder, folder == snapshot


def _outline(name: str, folder: Path, outline: Path) -> Path:
    """`folder` if all is there."""
    wanted = _wanted(name, folder)
    small = [file for file in wanted if not file.endswith(WEIGHTS)]
    if any(not (folder / file).exists() for file in small):
        _snapshot(name, folder.name, small)
    missing = {file: size for file, size in wanted.items() if not (folder / file).exists()}
    if not missing:
        return folder
    write_outline(outline, missing, partial(_read, name, folder.name))
    for file in wanted.keys() - missing:
        (outline / file).parent.mkdir(parents=True, exist_ok=True)
        (outline / file).symlink_to(folder / file)
    return outline


def _settings(name: str, revision: str | None) -> Path:
    """The snapshot's folder, which is named after its commit, with its index."""
    folder = _snapshot(name, revision, None)
    if not (folder / INDEX).is_file():
        raise Unsupported(f"{name} on the hub is no diffusers pipeline: it has no {INDEX}")
    return folder


def _snapshot(name: str, revision: str | None, files: Iterable[str] | None) -> Path:
    """With these files in it; None: its index and settings."""
    from huggingface_hub import snapshot_download

    exact = [INDEX, SETTINGS] if files is None else [glob.escape(file) for file in files]
    return Path(snapshot_download(name, revision=revision, allow_patterns=exact))


def _wanted(name: str, folder: Path) -> dict[str, int]:
    """Sizes of all that is needed of the snapshot whose index lies in `folder`; none while the hub cannot be asked."""
    from huggingface_hub import HfApi, errors

    try:
        listed = HfApi().model_info(name, revision=folder.name, files_metadata=True)
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:  # type: ignore[attr-defined]
        log.info("%s comes from the cache as it is, for the hub cannot be asked: %s", name, error)
        return {}  # loading names what is missing, if anything is
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings or ()}
    index = json_object((folder / INDEX).read_bytes(), folder / INDEX)
    return {file: sizes[file] for file in needed(index, sizes)}


def _read(name: str, commit: str, file: str, first: int, end: int) -> bytes:
    """Bytes `[first, end)` of a file on the hub. Unsupported: it gives no parts."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = build_hf_headers() | {"Range": f"bytes={first}-{end - 1}"}
    url = hf_hub_url(name, file, revision=commit)
    with get_session().stream(
        "GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
    ) as answer:
        hf_raise_for_status(answer)
        if answer.status_code != PARTIAL_CONTENT:
            raise Unsupported(f"{name}: this hub gives no parts of files (status {answer.status_code})")
        return bytes(answer.read())


@contextmanager
def _in_our_words(model: str) -> Iterator[tuple[str, str | None]]:
    """Name and revision; every error as Unsupported."""
    from huggingface_hub import errors

    found = split_id(model)
    assert found is not None
    name, revision = found
    try:
        yield name, revision
    except errors.GatedRepoError as error:
        raise Unsupported(
            f"{model}: its owner asks for consent: accept the terms on the hub, then set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise Unsupported(
            f"no model {model!r}: it is no folder here, and the hub has none of this name that you may read"
            " (a private one needs HF_TOKEN)"
        ) from error
    except errors.HFValidationError as error:
        raise Unsupported(
            f"no model {model[:_SHOWN]!r}: it is no folder here, and the hub has no ids of this form"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise Unsupported(f"{model}: {name} has no revision {revision}") from error
    except errors.LocalEntryNotFoundError as error:
        raise Unsupported(
            f"no model {model!r}: it is no folder here and not in the hub's cache, and {_out_of_reach(name)}"
        ) from error
    except (errors.HfHubHTTPError, errors.HTTPError, OSError) as error:  # type: ignore[attr-defined]
        raise Unsupported(f"{model}: it could not be fetched from the hub: {error}") from error


def _out_of_reach(name: str) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set: unset it, or fetch it elsewhere (hf download {name}) and copy HF_HOME"
    return "the hub cannot be reached: check the network, or name a local folder"
