"""What a file is by its first bytes. Names and content types are not asked: whoever sent it wrote them."""

from __future__ import annotations

from typing import IO

PICTURES = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
VIDEOS = ("MP4", "WEBM")
SOUNDS = ("WAV", "FLAC", "OGG", "MP3")
TAKEN = {"image": PICTURES, "mask": PICTURES, "video": VIDEOS, "audio": (*SOUNDS, *VIDEOS)}
"""The forms that each kind of input may have."""
_HEAD = 512
_MARKS = {
    b"\x89PNG\r\n\x1a\n": "PNG",
    b"\xff\xd8\xff": "JPEG",
    b"BM": "BMP",
    b"GIF8": "GIF",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"\x1a\x45\xdf\xa3": "WEBM",
    b"fLaC": "FLAC",
    b"OggS": "OGG",
    b"ID3": "MP3",
}
_BOXES = {b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"}
_AVIF = {b"avif", b"avis"}


def kind_of(file: IO[bytes]) -> str:
    """PNG, JPEG, WEBP, BMP, GIF, TIFF, AVIF, MP4, WEBM, AVI, WAV, FLAC, OGG, MP3, SVG, HTML, or "" for what is none of
    them. The file stands at its beginning afterwards."""
    file.seek(0)
    head = file.read(_HEAD)
    file.seek(0)
    if head[:4] == b"RIFF":
        return {b"WEBP": "WEBP", b"WAVE": "WAV", b"AVI ": "AVI"}.get(head[8:12], "")
    known = (name for mark, name in _MARKS.items() if head.startswith(mark))
    return next(known, "") or _by_structure(head)


def _by_structure(head: bytes) -> str:
    if head[4:8] in _BOXES:
        return "AVIF" if head[4:8] == b"ftyp" and head[8:12] in _AVIF else "MP4"
    if head[:1] == b"\xff" and head[1:2] and head[1] & 0xE6 == 0xE2:  # MPEG audio's sync, layer III
        return "MP3"
    return _markup(head)


def _markup(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")) and b"<svg" in text:
        return "SVG"
    return "HTML" if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) else ""
