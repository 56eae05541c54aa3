"""What people call the same thing: roles of arguments, by the names that they go under.

A constructor's `d_model`, `n_embd` and `hidden_size` are one role, "width"; a call's `attn_mask`
and `causal_mask` are another, "mask". Names are compared without case, and without underscores at
their ends.
"""

from __future__ import annotations

_BUILD: dict[str, str] = {
    "width": """d_in dim_in in_dim input_dim input_size in_features embed_dim embed_size emb_dim
        emb_size embedding_dim embedding_size embeddings_dim emb embed d_model dmodel model_dim
        dim_model model_size dim d n_embd n_embed n_emb embd_dim embed_dimension hidden_size
        hidden_dim d_hidden d_embed d_emb d_embedding num_hiddens n_hidden width n_state channels
        in_channels query_dim num_features features e c nx embd hidden q_dim dim_embed""",
    "out_width": """d_out dim_out out_dim output_dim output_size out_features out_channels
        out_width""",
    "kv_width": "kdim vdim kv_dim context_dim dim_context cross_attention_dim",
    "heads": """num_heads n_head n_heads heads h nhead nheads head_num heads_num num_head head
        num_attention_heads n_attention_heads num_attn_heads attention_heads attn_heads n_h
        num_q_heads num_query_heads nb_heads number_of_heads no_of_heads nr_heads heads_count
        head_count""",
    "kv_heads": """num_kv_heads n_kv_heads kv_heads num_key_value_heads n_kv_head n_kv num_kv_head
        n_head_kv num_kv_groups n_kv_groups num_kv n_groups num_groups num_query_groups g
        num_key_value""",
    "head_dim": """head_dim d_head dim_head head_size d_k d_v d_q d_kq d_qk d_qkv dk dv key_dim
        value_dim k_dim v_dim qk_dim qkv_dim attn_head_size attention_head_size head_width
        head_features d_key d_value dim_per_head head_hidden""",
    "context": """context_length context_len context_size ctx_len ctx_length ctx_size n_ctx context
        block_size max_seq_len max_seq_length max_sequence_length seq_len seq_length seqlen
        sequence_length max_len max_length maxlen n_positions max_position_embeddings max_context
        max_context_length max_tokens num_tokens n_tokens t max_t window_length
        max_target_positions""",
    "dropout": """dropout drop p p_drop drop_p p_dropout dropout_p dropout_rate drop_rate
        dropout_prob drop_prob attn_drop attn_dropout attn_pdrop resid_pdrop resid_drop
        resid_dropout proj_drop proj_dropout attention_dropout attention_drop residual_dropout
        attention_probs_dropout_prob hidden_dropout_prob out_dropout dropout_probability rate""",
    "bias": """bias qkv_bias use_bias out_bias add_bias proj_bias attention_bias attn_bias q_bias
        k_bias v_bias kv_bias use_qkv_bias has_bias with_bias bias_qkv bias_out""",
    "causal": """causal is_causal masked use_mask use_causal_mask apply_mask with_mask is_decoder
        autoregressive unidirectional mask causal_mask""",
    "batch_first": "batch_first",
    "layer": "layer_idx layer_index layer_id layer i_layer layer_number depth_index",
    "config": """config cfg args params configuration hparams hyperparams conf model_args opt
        options settings model_config gpt_config kwargs_dict""",
    "device": "device",
    "dtype": "dtype",
    "vocabulary": "vocab_size n_vocab vocabulary_size num_embeddings",
}

_CALL: dict[str, str] = {
    "query": "q query queries xq x_q q_in query_states query_input",
    "key": "k key keys xk x_k k_in key_states key_input",
    "value": "v value values val xv x_v v_in value_states value_input",
    "mask": """attn_mask attention_mask causal_mask mask src_mask tgt_mask look_ahead_mask
        lookahead_mask self_attn_mask self_mask m masks""",
    "padding": """key_padding_mask padding_mask pad_mask src_key_padding_mask key_mask kv_mask
        input_mask token_mask padding""",
    "lengths": "valid_lens valid_len valid_lengths lengths seq_lens seqlens input_lengths lens",
    "causal": "is_causal causal masked use_causal_mask apply_causal_mask apply_mask use_mask",
    "context": """context memory encoder_hidden_states encoder_output encoder_outputs enc_out
        enc_output kv x_kv kv_input key_value_states cond cross cross_input y other ctx
        encoder_out encoder_states kv_in kv_x""",
    "cache": """past_key_values past_key_value kv_cache cache layer_past past past_kv kvcache
        cache_kv prev_kv previous""",
    "use_cache": "use_cache return_cache return_kv",
    "weights": """need_weights output_attentions return_attention return_attn return_weights
        return_attention_weights return_attn_weights need_attn with_weights output_attention""",
    "rotary": "position_embeddings rotary rotary_emb",
    "complex": "freqs_cis freqs freqs_complex",
    "positions": "position_ids positions input_pos pos_ids pos position cache_position",
    "start": "start_pos start_position offset",
    "training": "training train is_training",
    "dropout": "dropout_p dropout p dropout_rate",
    "scale": "scale scaling sm_scale softmax_scale",
}


def _table(words: dict[str, str]) -> dict[str, str]:
    return {name: role for role, names in words.items() for name in names.split()}


_BUILD_ROLES, _CALL_ROLES = _table(_BUILD), _table(_CALL)


def building_role(name: str) -> str | None:
    """What a constructor's argument (or a config's field) is for; None where the name is unknown.

    >>> building_role("n_embd"), building_role("NUM_HEADS"), building_role("flavour")
    ('width', 'heads', None)
    """
    return _BUILD_ROLES.get(name.lower().strip("_"))


def calling_role(name: str) -> str | None:
    """What an argument of `forward` is for; None for the input itself and unknown names.

    >>> calling_role("Q"), calling_role("attention_mask"), calling_role("hidden_states")
    ('query', 'mask', None)
    """
    return _CALL_ROLES.get(name.lower().strip("_"))
