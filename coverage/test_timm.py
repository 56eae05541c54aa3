"""Vision models of timm, with random weights, and small where they can be."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import timm
import torch

from watching import Case, assert_left_out, assert_seen

SEEN = """
beit_base_patch16_224 caformer_s18 coatnet_nano_rw_224 crossvit_tiny_240 davit_tiny
deit_tiny_distilled_patch16_224 edgenext_xx_small efficientformer_l1 efficientvit_m0
eva02_tiny_patch14_224 fastvit_sa12 flexivit_small gcvit_xxtiny hieradet_small levit_128s
levit_conv_128s maxvit_rmlp_pico_rw_256 mobilenetv4_hybrid_medium mobilevit_xxs mvitv2_tiny
naflexvit_base_patch16_gap nest_tiny nextvit_small pit_ti_224 pvt_v2_b0 samvit_base_patch16_224
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window8_256 tiny_vit_5m_224
tnt_s_patch16_224 twins_pcpvt_small visformer_tiny vit_base_patch16_siglip_224
vit_relpos_small_patch16_224 vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3
vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_xsmall_patch16_clip_224 vitamin_small_224
xcit_nano_12_p16_224
""".split()

TOLD: dict[str, Any] = {
    "hiera_tiny_224": {"blocks.[0-3].*": -4},
    "twins_svt_small": {"*": -3},
    "volo_d1_224": {"network.0.*": -4},
    "halonet26t": 8,
    "botnet26t_256": 4,
    "sebotnet33ts_256": 4,
}
"""What `heads=` must say of those that nothing else tells of."""

LEFT_OUT = {  # how many calls are seen nevertheless, and the reason
    "cait_xxs24_224": (2, "no product with values was seen"),  # heads are mixed after the softmax
    "coat_lite_tiny": (0, "is over axis 2, not the last"),  # factorized: over the positions
    "convit_tiny": (0, "no product with values was seen"),  # a sum of two softmaxes
    "efficientformerv2_s0": (1, "no product with values was seen"),  # heads are mixed
    "lambda_resnet26t": (0, "batch rows, heads and blocks cannot be distinguished"),  # keys alone
    "mobilevitv2_050": (0, "no product with values was seen"),  # one weight for each key
}


def model_of(name: str) -> Case:
    for small in ({"depth": 2, "img_size": 96}, {"img_size": 96}, {}):
        with suppress(TypeError, ValueError, AssertionError, RuntimeError):  # what it cannot take
            model = timm.create_model(name, pretrained=False, **small).eval()
            sides = (96, 96) if small else model.default_cfg["input_size"][1:]
            picture = torch.randn(2 if small else 1, 3, *sides)
            model(picture)
            return model, lambda model, picture=picture: model(picture)
    raise ValueError(f"{name} takes no picture")


@pytest.mark.parametrize("name", SEEN)
def test_models_are_seen(name: str) -> None:
    assert_seen(model_of(name))


@pytest.mark.parametrize("name", TOLD)
def test_models_are_seen_where_heads_are_told(name: str) -> None:
    assert_seen(model_of(name), heads=TOLD[name])


@pytest.mark.parametrize("name", LEFT_OUT)
def test_models_are_left_out(name: str) -> None:
    seen, reason = LEFT_OUT[name]
    assert_left_out(model_of(name), reason, seen)
