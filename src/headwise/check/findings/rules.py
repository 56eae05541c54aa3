"""The rules of attention: what each one says, in plain words, and a short lesson on it.

`about` is what a broken rule means: "numbers" (the function computed is another one), "handling"
(the numbers are right, but moving, saving or calling the layer goes wrong) or "advice" (legal but
unwise). A mistake that the oracle names explains every broken rule about numbers. Advice that is
marked `later` waits until nothing is wrong any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
        id: its name, as findings and `--explain` use it.
        says: what holds where it is kept, one sentence.
        lesson: why, in a few sentences, for somebody who learns.
        evidence: "probe" (behaviour alone) or "oracle" (the weights are read).
        about: "numbers", "handling" or "advice".
        later: advice that waits until nothing is wrong.
    """

    id: str
    says: str
    lesson: str
    evidence: Literal["probe", "oracle"] = "probe"
    about: Literal["numbers", "handling", "advice"] = "numbers"
    later: bool = False


PROBE_RULES: tuple[Rule, ...] = (
    Rule(
        "builds",
        "The constructor runs.",
        "Nothing can be checked before the layer can be built. The line that failed is quoted; "
        "start there.",
        about="handling",
    ),
    Rule(
        "runs",
        "The call runs on x of shape [B, T, E].",
        "A layer takes a batch of B sequences of T tokens with E features. The check uses B = 2, "
        "T = 7 and E = 24, all different, so that axes that were mixed up do not fit by chance.",
    ),
    Rule(
        "shape",
        "Whatever the batch and the number of tokens, the output is [B, T, out_dim].",
        "Every token gets one output vector. Batches of one and sequences of one token are where "
        "squeeze() and fixed sizes go wrong: generation feeds one token at a time.",
    ),
    Rule(
        "finite",
        "Outputs are numbers: no NaN, no infinity.",
        "A softmax over scores that are all −inf is 0/0, which is NaN, and NaN spreads to "
        "everything. In causal attention every token must at least see itself: hide what lies "
        "above the diagonal, torch.triu(ones, diagonal=1), and not the diagonal.",
    ),
    Rule(
        "deterministic",
        "In eval mode the same input gives the same output.",
        "Dropout belongs to training. nn.Dropout switches itself off after model.eval(); the "
        "function F.dropout(x, p) does not, unless it is told training=self.training.",
        about="handling",
    ),
    Rule(
        "input-kept",
        "The input is not written to.",
        "x += y, x.mul_(y) and x[...] = y change the caller's tensor, which a residual connection "
        "still needs. Write x = x + y, which makes a new one.",
        about="handling",
    ),
    Rule(
        "causality",
        "Later tokens change no earlier output.",
        "A model that predicts the next token must not see it. So outputs up to token t may depend "
        "on tokens up to t alone: scores of later keys are set to −inf before the softmax, which "
        "makes their weights exactly 0. A large finite number such as −1e4 hides them only while "
        "scores are small, and a mask after the softmax leaves its trace in the denominator.",
    ),
    Rule(
        "past-used",
        "Every token that may be seen is seen.",
        "Attention is the only place in a transformer where tokens meet. If an output does not "
        "depend on an earlier token, the mask hides too much, or heads and tokens were mixed up.",
    ),
    Rule(
        "prefix",
        "A beginning of the sequence alone gives the beginning of the output.",
        "In causal attention what follows cannot matter, not even how much follows: f(x)[:, :t] "
        "equals f(x[:, :t]). It fails where the length of the sequence enters the arithmetic, such "
        "as scores divided by the root of the number of tokens.",
    ),
    Rule(
        "batch",
        "Sequences of a batch do not influence each other.",
        "A batch is many sequences computed at once for speed. If one changes another's output, "
        "batch and token axes were mixed up (a view or reshape without transpose), or a softmax "
        "or a norm runs over the wrong axis.",
    ),
    Rule(
        "equal-tokens",
        "Where all tokens are equal, so are all outputs.",
        "Weights of a row sum to 1. If every value is the same vector, their weighted mean is that "
        "vector, whatever the weights. It fails where rows do not sum to 1: a softmax over another "
        "axis, or a mask after the softmax.",
    ),
    Rule(
        "one-token",
        "For a single token, attention is only its value: an affine map.",
        "With one token the softmax has one entry, which is 1, and the output is "
        "out_proj(v_proj(x)). It is affine: f(a + b) + f(0) = f(a) + f(b). If not, something else "
        "than the softmax is not linear, or the softmax runs over another axis.",
    ),
    Rule(
        "order",
        "The order of the tokens before does not matter to the last one.",
        "Attention is a weighted sum, and a sum has no order: positions have to be put in (RoPE, "
        "ALiBi, position embeddings). If order matters without any of these, tokens were mixed "
        "with features or heads.",
        later=True,
    ),
    Rule(
        "gradients",
        "Gradients reach every parameter of every head.",
        "What gets no gradient never learns: a projection that is made and not used, a head that "
        "is dropped, a detach() or .data in the way. Only the bias of the keys may be without: it "
        "adds the same to all scores of a row, and the softmax does not see that.",
    ),
    Rule(
        "large-inputs",
        "Large inputs give large outputs, not NaN.",
        "exp(89) is too large for float32. torch.softmax subtracts the row's maximum first, which "
        "changes nothing and cannot overflow; exp(scores) / exp(scores).sum() can.",
        about="handling",
    ),
    Rule(
        "weights",
        "The attention weights that come back are weights.",
        "Row i holds how much query i takes from each key: nothing negative, sum 1, and 0 where "
        "the mask hides. Rows run over keys, the last axis.",
    ),
    Rule(
        "mask",
        "The mask that is passed is followed.",
        "There are two customs for a boolean mask: True may be seen (PyTorch's "
        "scaled_dot_product_attention), or True is hidden (nn.MultiheadAttention). Either is fine, "
        "as long as exactly the hidden keys have no influence.",
    ),
    Rule(
        "padding",
        "Padded tokens change nothing for the others.",
        "Sequences of a batch are filled up to one length. With the filling hidden as keys, each "
        "sequence must come out as if it stood alone.",
    ),
    Rule(
        "cross",
        "Queries and keys may come from sequences of different lengths.",
        "In cross-attention T queries look at S keys of another sequence. The output has T rows; "
        "keys and values must be reshaped with their own length S, not with the queries' T.",
    ),
    Rule(
        "cache",
        "Chunk after chunk with a cache gives what the whole sequence gives.",
        "With P tokens cached, query i of a chunk stands at position P + i. The mask must be "
        "aligned to the end: triu(diagonal=P + 1). One token at a time works without a mask, which "
        "hides the mistake; chunks of several tokens show it.",
    ),
    Rule(
        "contiguous",
        "An input in another memory order gives the same.",
        "x.transpose(0, 1) is a view with other strides. .view() refuses it with an error; "
        ".reshape() copies where it has to. Tensors taken apart by strides go wrong silently.",
        about="handling",
        later=True,
    ),
    Rule(
        "registered",
        "All weights and tensors are registered.",
        "nn.Module sees its parameters, its modules, its buffers, nn.ModuleList and "
        "nn.ParameterList. What stands in a Python list, or is a plain tensor attribute, is not "
        "moved by .to(), not saved, and its weights are not trained.",
        about="handling",
    ),
    Rule(
        "move",
        "The layer moves to another device and another dtype.",
        "A mask made once as self.mask = … stays on the CPU when the layer goes to a GPU; "
        "register_buffer makes it move along. A tensor made in forward needs device=x.device. The "
        "check moves to PyTorch's device `meta`, so no GPU is needed.",
        about="handling",
        later=True,
    ),
    Rule(
        "half",
        "It works in half precision.",
        "float16 ends at 65,504, so −1e9 does not fit. Use float('-inf'), or "
        "torch.finfo(scores.dtype).min.",
        about="advice",
        later=True,
    ),
    Rule(
        "reload",
        "Saved and loaded again, it gives the same.",
        "load_state_dict brings back parameters and buffers, and only those. If the output "
        "differs, something that matters is not among them.",
        about="handling",
    ),
    Rule(
        "context",
        "A sequence longer than the context is refused in words, or works.",
        "A mask of fixed size ends somewhere. `The size of tensor a (17) must match the size of "
        "tensor b (16)` does not say what to do; a ValueError that names both lengths does.",
        about="handling",
        later=True,
    ),
    Rule(
        "heads-divide",
        "A width that the heads do not divide is refused in words.",
        "24 features cannot be dealt out to 5 heads. Say so in the constructor, with a ValueError "
        "that names both numbers; otherwise the error comes later, somewhere else.",
        about="advice",
        later=True,
    ),
    Rule(
        "parameter-count",
        "It has the parameters that attention has.",
        "Queries, keys and values take 3·E·E numbers, the output projection E·E more, and biases E "
        "each. Other counts come from projections that are too wide, used twice, or not at all.",
        about="advice",
        later=True,
    ),
    Rule(
        "train-eval",
        "Without dropout, training and eval give the same.",
        "Dropout is the only thing in attention that training changes.",
        about="handling",
    ),
    Rule(
        "dropout",
        "Dropout leaves the output unchanged on average.",
        "Dropping weights after the softmax, and dividing the others by 1 − p, keeps every output "
        "right on average. Dropping scores before the softmax does not: a score of 0 is a score "
        "like any other.",
        about="handling",
    ),
    Rule(
        "init",
        "Initial weights have both signs.",
        "torch.rand gives numbers from 0 to 1, all positive. Then queries and keys all point the "
        "same way, scores grow with the square of the width, and the softmax sees only the "
        "largest: its gradient is nearly 0. nn.Linear's own start, or nn.init.xavier_uniform_, has "
        "mean 0.",
        about="advice",
    ),
    Rule(
        "buffer",
        "The mask is not part of what is saved.",
        "A T×T mask in the state_dict makes every checkpoint larger by T² numbers per layer, and "
        "ties it to one context length. register_buffer(…, persistent=False) leaves it out.",
        about="advice",
        later=True,
    ),
    Rule(
        "assert",
        "Users' mistakes are answered by ValueError.",
        "`python -O` removes assert statements, and then the mistake goes through. assert is for "
        "what cannot happen; for what a user can do, raise ValueError with both numbers.",
        about="advice",
        later=True,
    ),
)

# The oracle's rules: what the diagnosis names.
ORACLE_RULES: tuple[Rule, ...] = (
    Rule(
        "definition",
        "From its own weights, the textbook's formula gives the same output.",
        "softmax(Q Kᵀ / √D) V is little enough to compute it again: the projections are read off "
        "the module, given random weights, and every decision in between is taken as the textbook"
        " takes it. If the two outputs differ, the check tries the known mistakes, one by one and"
        " two by two, and names those that give exactly your numbers.",
        evidence="oracle",
    ),
    Rule(
        "scale",
        "Scores are divided by √D, the root of one head's width.",
        "A score is a sum of D products, so its spread grows with √D; divided by that, it stays "
        "near 1 whatever the width. Larger scores make the softmax pick one key and stop "
        "learning; smaller ones make all keys alike. D is the width of a head after the split, "
        "not that of the embedding, and never a number of tokens: keys.shape[-1], once they are "
        "split.",
        evidence="oracle",
    ),
    Rule(
        "causal-mask",
        "Exactly the keys after the query are hidden.",
        "Query i may see keys 0 … i, itself included. torch.triu(ones, diagonal=1) marks what to "
        "hide; torch.tril(ones) what to keep. diagonal=0 hides the token from itself, diagonal=2 "
        "shows it the answer. masked_fill fills where its mask is True, while in PyTorch's "
        "scaled_dot_product_attention True means that a key may be seen.",
        evidence="oracle",
    ),
    Rule(
        "mask-fill",
        "Hidden scores are −inf, before the softmax.",
        "The softmax shares out a weight of 1 among all scores that it is given, and only −inf "
        "gets nothing. 0 is a score like any other, −10000 is one that larger scores come near "
        "to, and what is set to 0 after the softmax has already taken its share from the others.",
        evidence="oracle",
    ),
    Rule(
        "softmax",
        "One softmax, over the keys.",
        "Scores are [B, H, queries, keys]. Each query shares out 1 among the keys, so the softmax"
        " runs over the last axis, dim=-1. dim=1 meant the keys while there was one sentence and "
        "one head; with a batch it is the queries, with an axis for the heads it is the heads.",
        evidence="oracle",
    ),
    Rule(
        "head-split",
        "Every head gets its own features of each token.",
        "From [B, T, H·D], view(B, T, H, D) cuts each token's features into H pieces, and "
        "transpose(1, 2) brings the heads forward: [B, H, T, D]. view(B, H, T, D) at once has the"
        " right shape and the wrong numbers, for view only reads on in memory: a 'head' is then "
        "made of all features of some tokens. The same goes for keys that are reshaped where they"
        " should be transposed.",
        evidence="oracle",
    ),
    Rule(
        "head-merge",
        "The heads' outputs stand side by side, token by token.",
        "From [B, H, T, D], transpose(1, 2) brings the tokens forward, and reshape(B, T, H·D) "
        "joins each token's heads. Without the transpose the shape is right and tokens are mixed."
        " Heads are joined, not summed or averaged: the output projection does the mixing.",
        evidence="oracle",
    ),
    Rule(
        "roles",
        "Each projection does what its name says.",
        "The query asks, the key is what it is compared with, the value is what is taken. "
        "Swapped, a layer still trains, under wrong names; and weights from elsewhere give "
        "nonsense.",
        evidence="oracle",
    ),
    Rule(
        "packing",
        "A packed matrix is unpacked in the order in which it is packed.",
        "GPT-2's c_attn and PyTorch's in_proj_weight hold all queries, then all keys, then all "
        "values. Other models pack head by head. Trained from scratch any order works; with "
        "weights that somebody else trained, only theirs.",
        evidence="oracle",
    ),
    Rule(
        "orientation",
        "A weight is used the way round in which it is stored.",
        "nn.Linear stores [features out, features in] and computes x @ weight.T; GPT-2's Conv1D "
        "stores [in, out] and computes x @ weight. Where the matrix is square, no error tells.",
        evidence="oracle",
    ),
    Rule(
        "bias",
        "A bias that is there is added.",
        "x @ layer.weight.T leaves the bias out; layer(x) does not. Only the keys' bias has no "
        "effect: it adds the same to all scores of a query.",
        evidence="oracle",
    ),
    Rule(
        "grouped-heads",
        "Neighbouring query heads share a key/value head.",
        "With G key/value heads for H query heads, query head h reads head h // (H // G): "
        "repeat_interleave(H // G, dim=1), 0 0 0 1 1 1. Tiled with repeat, 0 1 0 1 0 1, it trains"
        " as well, but the weights of Llama and its kin do not fit.",
        evidence="oracle",
    ),
    Rule(
        "output-projection",
        "The output projection is applied, once.",
        "Joined, the heads stand side by side and know nothing of each other. W_o mixes them; it "
        "is the last step of multi-head attention.",
        evidence="oracle",
    ),
    Rule(
        "residual",
        "The input is not added to the output.",
        "In a transformer the block adds it: x = x + attention(norm(x)). An attention that adds "
        "it as well counts it twice.",
        evidence="oracle",
    ),
    Rule(
        "rotation",
        "Rotary positions turn queries and keys, and nothing else.",
        "RoPE turns each query and each key by an angle that grows with its position. In their "
        "product only the difference of the two angles is left, the distance. With one of them "
        "turned alone, absolute positions come in; turned values mix up what is gathered.",
        evidence="oracle",
    ),
    Rule(
        "dropout-in-eval",
        "Dropout stops in eval mode.",
        "nn.Dropout knows from model.eval() that training is over. F.dropout(x, p) and the "
        "dropout_p of F.scaled_dot_product_attention do not: they drop whenever they are called, "
        "unless they are given training=self.training, or a probability of 0.",
        evidence="oracle",
        about="handling",
    ),
    Rule(
        "shared-heads",
        "Every head has weights of its own.",
        "[Head()] * n is a list that holds one object n times: all heads see and learn the same. "
        "[Head() for _ in range(n)] builds n.",
        evidence="oracle",
        about="handling",
    ),
    Rule(
        "registration",
        "Heads are kept where PyTorch finds them.",
        "Modules in a Python list are invisible: model.parameters() does not list them, so the "
        "optimiser does not train them; .to(), .eval() and state_dict() pass them by. "
        "nn.ModuleList is a list that PyTorch knows of.",
        evidence="oracle",
        about="handling",
    ),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in (*PROBE_RULES, *ORACLE_RULES)}


def explain(rule: str) -> str:
    """The lesson on one rule.

    Raises:
        ValueError: an unknown rule; the known ones are listed.
    """
    if rule not in RULES:
        raise ValueError(f"explain({rule!r}): there is no such rule; known are {', '.join(RULES)}")
    found = RULES[rule]
    return f"{found.id}: {found.says}\n\n{found.lesson}"
