"""Which readers of code tell which mistakes."""

from __future__ import annotations

from .read_built import (
    always_dropped,
    handed_up,
    listed_layers,
    made_anew,
    misspelt,
    moved_parameters,
    no_bias,
    on_a_gpu,
    repeated_layers,
    set_on_condition,
    worn_out,
)
from .read_caches import misaligned, stored_astray, stored_once
from .read_code import (
    either_tensor,
    empty_tests,
    late_tests,
    missing,
    never_read,
    no_functions,
    no_methods,
    powers,
    read_before,
    swapped,
    thrown_away,
    turned_values,
    undefined_names,
    unread_turns,
)
from .read_ends import fixed_tokens, masks_beside, positions_beside, returns_nothing
from .read_maps import (
    cut_otherwise,
    joined_otherwise,
    projected_maps,
    regions_astray,
    shifted_twice,
    unfolded_otherwise,
)
from .read_masks import (
    asked_masks,
    crossed_masks,
    dropped_masks,
    empty_bands,
    idle_flags,
    misread_by_fused,
    multiplied_masks,
    of_queries_alone,
    own_masks_by_fused,
    padded_blocks,
    small_fills,
    tiled_masks,
    zero_fills,
)
from .read_pieces import Reader
from .read_roles import (
    crossed_parts,
    gathered_keys,
    lost_roles,
    mixed_roles,
    own_products,
    unread_parts,
    unread_roles,
)
from .read_roots import inverse_roots, scaled_biases, whole_roots
from .read_sizes import (
    float_sizes,
    fused_merges,
    heads_apart,
    idle_permutes,
    read_on,
    read_on_turned,
    split_by_heads,
    split_on,
    summed_apart,
    viewed_heads,
)
from .read_softmax import (
    diagonals,
    own_softmaxes,
    paired_alone,
    said_axes,
    single_numbers,
    unsaid_axes,
)
from .rotations import quarter_turns

READERS: dict[str, tuple[Reader, ...]] = {
    "builds": (misspelt, worn_out, handed_up),
    "shape": (returns_nothing, fixed_tokens),
    "roles": (
        mixed_roles,
        lost_roles,
        unread_roles,
        unread_parts,
        crossed_parts,
        gathered_keys,
        own_products,
    ),
    "mask-fill": (multiplied_masks, small_fills, zero_fills),
    "mask": (
        dropped_masks,
        tiled_masks,
        misread_by_fused,
        own_masks_by_fused,
        idle_flags,
        crossed_masks,
        masks_beside,
        empty_bands,
        regions_astray,
    ),
    "padding": (padded_blocks, of_queries_alone),
    "cache": (misaligned, stored_once, stored_astray),
    "scale": (powers, whole_roots, inverse_roots, scaled_biases),
    "head-split": (viewed_heads, heads_apart, split_by_heads, split_on),
    "definition": (
        read_on,
        summed_apart,
        idle_permutes,
        shifted_twice,
        joined_otherwise,
        cut_otherwise,
        projected_maps,
        unfolded_otherwise,
        diagonals,
    ),
    "head-merge": (fused_merges,),
    "softmax": (said_axes, unsaid_axes, single_numbers, paired_alone, own_softmaxes),
    "rotary": (read_on_turned, positions_beside),
    "rotation": (quarter_turns, unread_turns, turned_values),
    "bias": (no_bias,),
    "registered": (moved_parameters,),
    "registration": (listed_layers, made_anew),
    "shared-heads": (repeated_layers,),
    "move": (on_a_gpu,),
    "dropout-in-eval": (always_dropped,),
    "unused-result": (thrown_away, never_read),
    "runs": (
        late_tests,
        empty_tests,
        either_tensor,
        asked_masks,
        set_on_condition,
        missing,
        undefined_names,
        read_before,
        no_methods,
        no_functions,
        float_sizes,
        swapped,
    ),
}
"""By rule, who reads mistakes of it."""
