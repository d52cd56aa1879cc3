"""Pictures and masks, read as diffusers' `load_image` reads them: turned as their EXIF says, then made RGB.

So CMYK and palettes become what Pillow's `convert("RGB")` makes of them; alpha is dropped, not blended, unless the task
takes it. A mask is made gray from that, as diffusers' mask processor does. Gray of 16 bits is the exception: Pillow
would cut it off at 255, here it keeps its upper 8 bits, as colours of 16 bits do.
"""

from __future__ import annotations

import warnings
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import AvifImagePlugin, Image, ImageOps, UnidentifiedImageError
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.jpeg import check_work
from saggar.workers.inputs.sniff import PICTURES, kind_of

FORMATS = PICTURES
PEAK_BYTES = 14
"""Of a pixel, while a picture is decoded and converted; as measured with 64 million of them."""
_PEAKS = {"WEBP": 24, "AVIF": 24}  # whole frames of their libraries' own come first
AvifImagePlugin.DEFAULT_MAX_THREADS = 2  # not one for each core: several pictures are decoded at a time
_WIDE = ("I", "F")
_GRAY_16 = ("I;16", "I;16B", "I;16L", "I;16N", "I")
_ALLOWED = f"still pictures: {', '.join(FORMATS)}"

Mode = Literal["RGB", "RGBA", "L"]


class Picture:
    """A picture's header, checked; its pixels are decoded by `read`."""

    def __init__(self, file: IO[bytes], pixels: int, mode: Mode) -> None:
        """Raises BadInput."""
        self._mode = mode
        self._image = image = _open(file)
        width, height = image.size
        if width * height > pixels:
            raise BadInput(f"has {width} x {height} pixels", f"at most {pixels} pixels")
        if _is_several(image):
            raise BadInput(
                "is animated or has several pages",
                "a still picture; for a video give inputs.video an MP4 or WebM",
            )
        if image.mode in _WIDE and image.format != "PNG":  # a PNG of 16 bits, with older Pillows
            raise BadInput("has channels of 32 bits", "8 or 16 bits a channel")
        if image.format in ("JPEG", "MPO"):
            check_work(file)
        self.bytes = width * height * _PEAKS.get(image.format or "", PEAK_BYTES)
        self.kept = width * height * len(mode)

    def read(self) -> NDArray[np.uint8]:
        """uint8: H×W×3, H×W×4 for RGBA, H×W for L. Raises BadInput."""
        try:
            image = _in_8_bits(ImageOps.exif_transpose(self._image))
            image = image.convert("RGBA" if self._mode == "RGBA" else "RGB")
            return np.array(image.convert("L") if self._mode == "L" else image)
        except MemoryError:
            raise
        except Exception as error:  # Pillow's decoders raise whatever a file brings them to
            raise BadInput(f"cannot be decoded: {_said(error)}", _ALLOWED) from error


def _open(file: IO[bytes]) -> Image.Image:
    kind = kind_of(file)
    if kind not in FORMATS:
        raise BadInput(f"is no picture that is read ({kind or 'unknown form'})", _ALLOWED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is our own
            return Image.open(file, formats=[kind])
    except Image.DecompressionBombError as error:
        raise BadInput("has far too many pixels", "pictures of a reasonable size") from error
    except UnidentifiedImageError as error:
        raise BadInput(f"is damaged, or no {kind} at all", _ALLOWED) from error
    except MemoryError:
        raise
    except Exception as error:
        raise BadInput(f"cannot be read: {_said(error)}", _ALLOWED) from error


def _is_several(image: Image.Image) -> bool:
    """Whether there is a second one, which is looked for and no further: a file may hold millions. That of a phone's
    JPEG (MPO) is no page."""
    try:
        return image.format != "MPO" and bool(getattr(image, "is_animated", False))
    except MemoryError:
        raise
    except Exception as error:  # as in `read`
        raise BadInput(f"is damaged: {_said(error)}", _ALLOWED) from error


def _in_8_bits(image: Image.Image) -> Image.Image:
    if image.mode not in _GRAY_16:
        return image
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
