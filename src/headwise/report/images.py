"""Vision transformers, which read an image as patches."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .sample import LookError, Part, Sample, Subject, as_look_error
from .schema import Stream

PICTURE_SIDE = 384  # the maximum number of pixels per side of the stored picture


class Images(Subject):
    """A `transformers` model that reads `pixel_values`, with its image processor."""

    kind = "a vision transformer"

    def __init__(self, model: Any, processor: Any, context: int | None) -> None:
        super().__init__(model, context)
        if context is not None:
            raise LookError(
                f"context {context}: images are always read as a whole; leave context out"
            )
        if getattr(model.config, "num_labels", 0) and "ImageClassification" in type(model).__name__:
            self.kind = "a vision transformer that names images"
            self.loss_of = "its most likely class"
        self.processor = getattr(processor, "image_processor", processor)
        if not callable(self.processor) or hasattr(processor, "convert_ids_to_tokens"):
            raise LookError(
                f"tokenizer={processor!r:.80}: {type(model).__name__} reads images; pass its "
                f"image processor"
            )

    def sample(self, text: Any, name: str) -> Sample:
        if not (isinstance(text, Path) or hasattr(text, "convert")):
            raise LookError(
                f"{name} ({type(text).__name__}) is not an image, but {type(self.model).__name__} "
                f"reads images; pass a Pillow image or a Path (--image FILE)"
            )
        image = open_image(text) if isinstance(text, Path) else text
        pixels = self.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"]
        weights = next(self.model.parameters())
        inputs = {"pixel_values": pixels.to(weights.device, weights.dtype)}
        with as_look_error(self.model):
            given = self.model(**inputs, output_hidden_states=True)
        rows, columns = self._grid(pixels)
        hidden = getattr(given, "hidden_states", None)
        extra = hidden[0].shape[1] - rows * columns if hidden else 0
        if extra < 0:
            raise LookError(
                f"{name}: {-extra} of {rows} × {columns} patches are not among the tokens"
            )
        special = ["[CLS]", *(f"[{n}]" for n in range(1, extra))][:extra]
        patches = [f"{row},{column}" for row in range(rows) for column in range(columns)]
        stream = Stream(
            "image",
            [*special, *patches],
            tuple(range(extra)),
            grid=(rows, columns),
            picture=self._picture(pixels),
        )
        # The class that the intact model predicts; it stays the label when heads are ablated later.
        labels = given.logits.argmax(-1) if self.loss_of else None
        return Sample(inputs, [Part(stream)], len(stream.tokens), labels)

    def logits(self, sample: Sample) -> Tensor | None:
        return getattr(self.model(**sample.inputs), "logits", None)

    def losses_of(self, sample: Sample, logits: Tensor) -> Tensor | None:
        if sample.labels is None:
            return None
        return F.cross_entropy(logits.double(), sample.labels, reduction="none")[:, None]

    def _grid(self, pixels: Tensor) -> tuple[int, int]:
        size = getattr(self.model.config, "patch_size", None)
        if size is None:
            raise LookError(
                f"{type(self.model).__name__}: its config has no patch_size, so its tokens cannot "
                f"be matched to patches; watch() captures its heads nevertheless"
            )
        rows, columns = (size, size) if isinstance(size, int) else size
        return pixels.shape[-2] // rows, pixels.shape[-1] // columns

    def _picture(self, pixels: Tensor) -> bytes:
        """Return the image as the model receives it, as a PNG."""
        from PIL import Image

        shown = pixels[0].float()
        if getattr(self.processor, "do_normalize", False):
            mean, deviation = (
                torch.tensor(getattr(self.processor, name), dtype=shown.dtype)[:, None, None]
                for name in ("image_mean", "image_std")
            )
            shown = shown * deviation + mean
        levels = (shown.clamp(0, 1) * 255).round().byte().permute(1, 2, 0)
        picture = Image.fromarray(levels.cpu().numpy())
        picture.thumbnail((PICTURE_SIDE, PICTURE_SIDE))
        out = io.BytesIO()
        picture.save(out, "PNG", optimize=True)
        return out.getvalue()


def open_image(path: str | Path) -> Any:
    """Read an image file.

    Raises:
        LookError: the file is missing or not an image; Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise LookError(
            "images require the pillow package: pip install 'headwise[images]'"
        ) from None
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise LookError(f"{path}: no such file") from None
    except (UnidentifiedImageError, OSError) as error:
        raise LookError(f"{path}: cannot be read as an image ({error})") from None
