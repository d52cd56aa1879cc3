"""Models by their id on the Hugging Face hub, `org/name` or `org/name@revision`: fetched once, then local.

huggingface_hub's own settings count: HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE. Only what the pipeline is
loaded from is fetched, never a pickle. No torch.
"""

from __future__ import annotations

import glob
import logging
import re
from pathlib import Path

from saggar.engine.errors import Unsupported
from saggar.engine.models.source.files import INDEX, SETTINGS, json_object, needed

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
    from huggingface_hub import errors, snapshot_download

    found = split_id(model)
    assert found is not None
    name, revision = found
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[INDEX, SETTINGS]))
        _fetch_rest(name, folder)
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
    except (errors.HfHubHTTPError, OSError) as error:
        raise Unsupported(f"{model}: it could not be fetched from the hub: {error}") from error
    return folder


def _fetch_rest(name: str, folder: Path) -> None:
    """All that is needed of the snapshot whose index lies in `folder`, which is named after its commit."""
    from huggingface_hub import HfApi, errors, snapshot_download

    if not (folder / INDEX).is_file():
        raise Unsupported(f"{name} on the hub is no diffusers pipeline: it has no {INDEX}")
    try:
        listed = HfApi().model_info(name, revision=folder.name, files_metadata=True)
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as error:  # type: ignore[attr-defined]
        log.info("%s comes from the cache as it is, for the hub cannot be asked: %s", name, error)
        return  # loading names what is missing, if anything is
    sizes = {file.rfilename: file.size or 0 for file in listed.siblings or ()}
    wanted = needed(json_object((folder / INDEX).read_bytes(), folder / INDEX), sizes)
    missing = [file for file in wanted if not (folder / file).exists()]
    if not missing:
        return
    size = sum(sizes[file] for file in missing) / 1e9
    log.info("fetching %s from the hub: %d files, %.1f GB", name, len(missing), size)
    exact = [glob.escape(file) for file in wanted]
    snapshot_download(name, revision=folder.name, allow_patterns=exact)
    log.info("fetched %s to %s", name, folder)


def _out_of_reach(name: str) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set: unset it, or fetch it elsewhere (hf download {name}) and copy HF_HOME"
    return "the hub cannot be reached: check the network, or name a local folder"
