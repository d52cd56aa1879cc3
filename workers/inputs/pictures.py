"""Pictures and masks, read as diffusers' `load_image` reads them: turned as their EXIF says, then made RGB.

So 16 bits, CMYK and palettes become what Pillow's `convert("RGB")` makes of them; alpha is dropped, not blended, unless
the task takes it. A mask is made gray from that, as diffusers' mask processor does.
"""

from __future__ import annotations

import warnings
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from saggar.workers.inputs.bad import BadInput
from saggar.workers.inputs.sniff import PICTURES, kind_of

FORMATS = PICTURES
PEAK_BYTES = 12
"""Of a pixel, while a picture is decoded and converted."""
_ALLOWED = f"still pictures: {', '.join(FORMATS)}"

Mode = Literal["RGB", "RGBA", "L"]


class Picture:
    """A picture's header, checked; its pixels are decoded by `read`."""

    def __init__(self, file: IO[bytes], pixels: int, mode: Mode) -> None:
        """Raises BadInput."""
        self._mode = mode
        self._image = _open(file)
        width, height = self._image.size
        if width * height > pixels:
            raise BadInput(f"has {width} x {height} pixels", f"at most {pixels} pixels")
        frames = _frames(self._image)
        if frames > 1:
            raise BadInput(
                f"is animated or has several pages ({frames})",
                "a still picture; for a video give inputs.video an MP4 or WebM",
            )
        self.bytes = width * height * PEAK_BYTES

    def read(self) -> NDArray[np.uint8]:
        """uint8: H×W×3, H×W×4 for RGBA, H×W for L. Raises BadInput."""
        try:
            image = ImageOps.exif_transpose(self._image)
            image = image.convert("RGBA" if self._mode == "RGBA" else "RGB")
            return np.array(image.convert("L") if self._mode == "L" else image)
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
    except Exception as error:
        raise BadInput(f"cannot be read: {_said(error)}", _ALLOWED) from error


def _frames(image: Image.Image) -> int:
    """Pictures in the file; the second one of a phone's JPEG (MPO) is not counted."""
    try:
        return 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    except Exception as error:  # as in `read`
        raise BadInput(f"is damaged: {_said(error)}", _ALLOWED) from error


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
