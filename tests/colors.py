"""Colors as eyes see them: contrast (WCAG 2), three kinds of color blindness, and how far apart
two colors look (CIEDE2000)."""

from __future__ import annotations

import numpy as np

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLIND = {
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
_TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.119192, 0.9503041],
    ]
)
_WHITE = _TO_XYZ.sum(1)


def linear(color: str) -> np.ndarray:
    """`#d55e00` as linear RGB."""
    parts = np.array([int(color[n : n + 2], 16) for n in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors, 1 to 21."""
    low, high = sorted(float(linear(color) @ _TO_XYZ[1]) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def seen(color: str, blindness: str | None = None) -> np.ndarray:
    """The color in CIELAB, as someone with a kind of color blindness sees it."""
    rgb = linear(color)
    if blindness is not None:
        rgb = (np.array(BLIND[blindness]) @ rgb).clip(0, 1)
    ratio = _TO_XYZ @ rgb / _WHITE
    f = np.where(ratio > 216 / 24389, np.cbrt(ratio), (24389 / 27 * ratio + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """CIEDE2000 between two colors in CIELAB (Sharma, Wu and Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (np.hypot(a1, b1) + np.hypot(a2, b2)) / 2
    stretch = 1 + 0.5 * (1 - np.sqrt(mean**7 / (mean**7 + 25.0**7)))
    c1, c2 = np.hypot(a1 * stretch, b1), np.hypot(a2 * stretch, b2)
    h1, h2 = (np.degrees(np.arctan2(b, a * stretch)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = h2 - h1
    turn -= 360 * np.sign(turn) * (abs(turn) > 180)
    turn *= c1 * c2 > 0
    hue = h1 + h2 if c1 * c2 == 0 else (h1 + h2) / 2
    if c1 * c2 > 0 and abs(h1 - h2) > 180:
        hue += 180 if h1 + h2 < 360 else -180
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    weight = (
        1
        - 0.17 * np.cos(np.radians(hue - 30))
        + 0.24 * np.cos(np.radians(2 * hue))
        + 0.32 * np.cos(np.radians(3 * hue + 6))
        - 0.20 * np.cos(np.radians(4 * hue - 63))
    )
    s_l = 1 + 0.015 * (light - 50) ** 2 / np.sqrt(20 + (light - 50) ** 2)
    s_c, s_h = 1 + 0.045 * chroma, 1 + 0.015 * chroma * weight
    twist = (
        -2
        * np.sqrt(chroma**7 / (chroma**7 + 25.0**7))
        * np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    )
    dl, dc = (l2 - l1) / s_l, (c2 - c1) / s_c
    dh = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2)) / s_h
    return float(np.sqrt(dl**2 + dc**2 + dh**2 + twist * dc * dh))
