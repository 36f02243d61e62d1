"""The tiny goal environment with pictures, which need no OpenGL."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tiny_goal_environment import PointReach


class DrawnPointReach(PointReach):
    """Draws the point white and the goal red, on black."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # Gymnasium's own form

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> npt.NDArray[np.uint8]:  # pyright: ignore[reportIncompatibleMethodOverride]
        picture = np.zeros((64, 64, 3), np.uint8)
        for place, colour in ((self.goal, (255, 0, 0)), (self.position, (255, 255, 255))):
            row, column = (int((value + 1) * 28) for value in place)
            picture[row : row + 8, column : column + 8] = colour
        return picture
