"""TransformerLens: its bridge around models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformer_lens import head_detector
from transformer_lens import patching as patches
from transformer_lens.model_bridge import TransformerBridge

from . import shared

PACKAGES = ["transformer-lens==4.3.0", "transformers==5.23.0"]


def bridge(model: Any, tokenizer: Any) -> TransformerBridge:
    return TransformerBridge.boot_transformers(
        str(shared.BUILTIN), hf_model=model, tokenizer=tokenizer, device="cpu"
    )


def weights() -> str:
    model, tokenizer = shared.trained()
    tokens = torch.tensor([tokenizer.encode(shared.TEXT)])
    wanted = model(tokens, output_attentions=True).attentions[1].detach()
    _, cache = bridge(model, tokenizer).run_with_cache(tokens)
    return f"yes, on its eager path ({shared.agree(cache['pattern', 1], wanted)})"


def entropies(length: int) -> Callable[[], list[Tensor]]:
    lens = bridge(shared.gpt(length), shared.trained()[1])
    tokens = shared.ids(length)

    def run() -> list[Tensor]:
        found: list[Tensor] = []

        def keep(pattern: Tensor, hook: Any) -> None:
            found.append(shared.entropies(pattern))

        hooks = [(f"blocks.{n}.attn.hook_pattern", keep) for n in range(shared.LAYERS)]
        with torch.no_grad():
            lens.run_with_hooks(tokens, fwd_hooks=hooks)
        return found

    return run


def training() -> str:
    model, tokenizer = shared.trained()
    lens = bridge(model, tokenizer)
    found: list[Tensor] = []
    tokens = torch.tensor([tokenizer.encode(shared.TEXT)])
    hooks = [("blocks.1.attn.hook_pattern", lambda p, hook: found.append(shared.entropies(p)))]
    loss = lens.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks)
    loss.backward()
    assert found[0].shape == (1, 4, tokens.shape[1])
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    return "by a hook of one's own"


def gradients() -> str:
    model, tokenizer = shared.trained()
    lens = bridge(model, tokenizer)
    found: list[Tensor] = []
    tokens = torch.tensor([tokenizer.encode(shared.TEXT)])
    hooks = [("blocks.1.attn.hook_pattern", lambda p, hook: found.append(shared.with_gradient(p)))]
    lens.run_with_hooks(tokens, fwd_hooks=hooks)
    found[0].sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    return "yes, through the matrix"


def ablation() -> str:
    model, tokenizer = shared.trained()
    lens = bridge(model, tokenizer)
    tokens = torch.tensor([tokenizer.encode(shared.TEXT)])

    def zero(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, 2] = 0
        return z

    whole = lens(tokens)
    without = lens.run_with_hooks(tokens, fwd_hooks=[("blocks.0.attn.hook_z", zero)])
    assert not torch.allclose(whole, without)
    return "yes: a hook on `hook_z`"


def patching() -> str:
    model, tokenizer = shared.trained()
    lens = bridge(model, tokenizer)
    clean, corrupted = shared.ids(12), shared.ids(12).roll(1)
    _, cache = lens.run_with_cache(clean)
    found = patches.get_act_patch_attn_head_out_all_pos(
        lens, corrupted, cache, lambda logits: logits[0, -1, 0]
    )
    assert tuple(found.shape) == (3, 4)
    return "yes, of any activation: ready-made sweeps"


def probes() -> str:
    model, tokenizer = shared.trained()
    found = head_detector.detect_head(bridge(model, tokenizer), shared.TEXT, "previous_token_head")
    assert tuple(found.shape) == (3, 4)
    return f"yes: 3 (`detect_head`); previous token {float(found.max()):.2f}"
