"""Pictures of matplotlib as files."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from .json_files import write_atomically


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_figure(figure: "Figure", path: Path) -> None:
    """
    Write a picture to a file, which stays as it was until all of it is written.

    Args:
        figure (`matplotlib.figure.Figure`):
            The picture.
        path (`pathlib.Path`):
            The file, whose ending says the format.

    Raises:
        ValueError: for a format that matplotlib does not know.
    """
    image = io.BytesIO()
    figure.savefig(image, dpi=150, format=path.suffix[1:] or "png")
    write_atomically(path, image.getvalue())
