"""Image and video models of diffusers, with random weights and tiny configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_processor
from torch import nn

import headwise as hw
from watching import Case, assert_left_out, assert_seen

B, TEXT = 2, 5
T = torch.tensor([1, 2])


def unet(processor: Any = None, fused: bool = False, mask: bool = False) -> Case:
    model = diffusers.UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=8,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
    )  # fmt: skip
    if processor is not None:
        model.set_attn_processor(processor)
    if fused:
        model.fuse_qkv_projections()
    image, text = torch.randn(B, 4, 8, 8), torch.randn(B, 7, 32)
    allowed = torch.ones(B, 7, dtype=torch.bool)
    allowed[1, 4:] = False
    kwargs = {"encoder_attention_mask": allowed} if mask else {}
    return model, lambda model: model(image, T, text, **kwargs).sample


def of(model: nn.Module, **inputs: Any) -> Case:
    return model, lambda model: model(**inputs).sample


def flux() -> Case:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    return of(
        model, hidden_states=torch.randn(B, 16, 4), encoder_hidden_states=torch.randn(B, TEXT, 32),
        pooled_projections=torch.randn(B, 32), timestep=T.float(),
        img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(TEXT, 3),
    )  # fmt: skip


def flux_2() -> Case:
    model = diffusers.Flux2Transformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    return of(
        model, hidden_states=torch.randn(B, 16, 4), encoder_hidden_states=torch.randn(B, TEXT, 32),
        timestep=T.float(), guidance=torch.ones(B),
        img_ids=torch.zeros(16, 4), txt_ids=torch.zeros(TEXT, 4),
    )  # fmt: skip


def sd3() -> Case:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return of(
        model, hidden_states=torch.randn(B, 4, 8, 8), timestep=T.float(),
        encoder_hidden_states=torch.randn(B, TEXT, 32), pooled_projections=torch.randn(B, 64),
    )  # fmt: skip


def qwen_image(padded: bool = False) -> Case:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    mask = torch.ones(B, TEXT, dtype=torch.bool)
    if padded:
        mask[1, 3:] = False
    return of(
        model, hidden_states=torch.randn(B, 16, 16), timestep=T.float(),
        encoder_hidden_states=torch.randn(B, TEXT, 16), encoder_hidden_states_mask=mask,
        img_shapes=[[(1, 4, 4)]] * B,
    )  # fmt: skip


def pixart() -> Case:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=3,
        caption_channels=32, in_channels=4, cross_attention_dim=24, out_channels=8,
        use_additional_conditions=False,
    )  # fmt: skip
    return of(
        model, hidden_states=torch.randn(B, 4, 8, 8), timestep=T,
        encoder_hidden_states=torch.randn(B, 8, 32),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    )  # fmt: skip


def dit() -> Case:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        sample_size=8, num_embeds_ada_norm=10, norm_num_groups=4,
    )  # fmt: skip
    return of(model, hidden_states=torch.randn(B, 4, 8, 8), timestep=T, class_labels=T)


def wan() -> Case:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    return of(
        model, hidden_states=torch.randn(1, 4, 2, 8, 8), timestep=T[:1],
        encoder_hidden_states=torch.randn(1, 6, 16),
    )  # fmt: skip


def autoencoder() -> Case:
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return of(model, sample=torch.randn(1, 3, 16, 16))


def sana() -> Case:
    model = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=4,
        num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=4,
        cross_attention_dim=8, caption_channels=8, sample_size=32,
    )  # fmt: skip
    return of(
        model, hidden_states=torch.randn(B, 4, 8, 8), timestep=T,
        encoder_hidden_states=torch.randn(B, 8, 8),
    )  # fmt: skip


SEEN: dict[str, Callable[[], Case]] = {
    "UNet": unet,
    "UNet with padded text": lambda: unet(mask=True),
    "UNet, eager": lambda: unet(attention_processor.AttnProcessor()),
    "UNet, fused projections": lambda: unet(fused=True),
    "DiT": dit,
    "Flux": flux,
    "Flux 2": flux_2,
    "SD3": sd3,
    "Qwen-Image": qwen_image,
    "Qwen-Image with padded text": lambda: qwen_image(padded=True),
    "PixArt": pixart,
    "Wan": wan,
    "AutoencoderKL": autoencoder,
}


@pytest.mark.parametrize("name", SEEN)
def test_models_are_seen(name: str) -> None:
    assert_seen(SEEN[name]())


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        *((name, {"text": (0, TEXT), "image": (TEXT, TEXT + 16)})
          for name in ("Flux", "Flux 2", "Qwen-Image")),
        ("SD3", {"image": (0, 16), "text": (16, 16 + TEXT)}),
    ],
)  # fmt: skip
def test_streams_have_names(name: str, streams: dict[str, tuple[int, int]]) -> None:
    model, call = SEEN[name]()
    with torch.no_grad(), hw.watch(model.eval(), hw.Entropy()) as seen:
        call(model)
    assert seen[0].streams == streams
    with (
        torch.no_grad(),
        hw.watch(model, hw.Segments(streams), queries=range(*streams["image"])) as seen,
    ):
        call(model)
    for row in seen.table():  # of every block, also those that do not split their output
        assert row["text"] + row["image"] == pytest.approx(1.0, abs=1e-5)


def test_linear_attention_is_no_softmax() -> None:
    assert_seen(sana())  # its cross-attention; its self-attention has no softmax


def test_slices_of_heads_are_left_out() -> None:
    sliced = unet(attention_processor.SlicedAttnProcessor(4))
    assert_left_out(sliced, "batch rows, heads and blocks cannot be distinguished")
