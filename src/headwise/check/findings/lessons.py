"""The rules on files and on steps, and the lesson on any rule."""

from __future__ import annotations

import difflib

from .rules import RULES, Rule

FILE_RULES = (
    Rule(
        "file-syntax",
        "The file is Python.",
        "Python reads the whole file before it runs any of it. A bracket that is not closed is "
        "often noticed only on the next line, so look at the line before, too.",
        about="handling",
    ),
    Rule(
        "file-import",
        "The file can be imported.",
        "To check what is in a file, it has to be imported, and then everything at its top "
        "level runs. Definitions belong there; what trains, loads or plots belongs under `if "
        '__name__ == "__main__":`, which only `python FILE.py` runs. A file that imports others '
        "finds those beside it.",
        about="handling",
    ),
    Rule(
        "file-exit",
        "The file does not end Python.",
        "`exit()`, `sys.exit()` and `quit()` end the program that imports the file. They belong "
        'under `if __name__ == "__main__":`; to say that a call is wrong, raise ValueError.',
        about="handling",
    ),
    Rule(
        "file-time",
        "The file comes to an end.",
        "A check takes seconds. A loop whose condition never changes, an input that is waited "
        "for, or a training run at the top of the file takes for ever. The line that was being "
        "run when time was up is shown.",
        about="handling",
    ),
    Rule(
        "file-memory",
        "The file gets by with little memory.",
        "The check's inputs are tiny, so attention on them needs megabytes. More means that "
        "something grows in a loop, or that a shape was multiplied rather than matched: adding "
        "[N, 1] to [N] gives [N, N].",
        about="handling",
    ),
    Rule(
        "file-output",
        "The file does not print without an end.",
        "What the file prints while it is checked is not shown, and megabytes of it stop the "
        "check. A print in `forward` is run at every call; print shapes, not tensors.",
        about="handling",
    ),
    Rule(
        "file-disk",
        "The file fills no disk.",
        "All bytes that the file and what it starts write count, wherever they go. Attention needs "
        "no files; a checkpoint that is saved in `forward` is saved at every call.",
        about="handling",
    ),
    Rule(
        "file-processes",
        "The file starts no crowd of processes.",
        "Each process that runs `os.fork()` in a loop runs the rest of the loop in its copy, "
        "too: ten rounds are a thousand processes. Attention needs none.",
        about="handling",
    ),
    Rule(
        "file-call",
        "What is checked can be called.",
        "An attention takes x [B, T, E], or query, key and value, and gives one tensor back. It "
        "is called with several batches, lengths and dtypes; an error in any of these calls is "
        "shown with its line.",
        about="handling",
    ),
    Rule(
        "file-crash",
        "Python itself does not crash.",
        "Plain Python does not crash; it raises. A signal such as SIGSEGV comes from C: "
        "recursion past the real stack, memory that is not there, a library called with wrong "
        "pointers.",
        about="handling",
    ),
)

STEP_RULES = (
    Rule(
        "step-imports",
        "Every name that is used is imported or defined.",
        "Python looks a name up when the line that uses it runs. A base class in `class "
        "A(Module):` runs at import, so nothing of the file works before that name is there.",
    ),
    Rule(
        "step-parts",
        "All parts of the step are there, under their names.",
        "A step names its functions, layers and methods so that weights of others load into "
        "them: `c_attn` and `c_proj` are GPT-2's own names.",
    ),
    Rule(
        "step-blanks",
        "No placeholder is left.",
        "A blank is a None where a value belongs: an attribute, a variable or what is returned. "
        "Fill them in any order; every part that can be run by itself is.",
    ),
    Rule(
        "step-sizes",
        "The class can be built, and its sizes are right.",
        "The heads share the width: each takes embed_dim // num_heads features. GPT-2 has 12 "
        "heads of 64 in 768.",
    ),
    Rule(
        "step-projections",
        "The projections have the right shapes.",
        "Queries, keys and values are three linear functions of the same token. One layer three "
        "times as wide computes all of them at once; the output projection mixes what the heads "
        "found.",
    ),
    Rule(
        "step-split",
        "The heads are split: [B, T, H·D] becomes [B, H, T, D].",
        "A token's features are its heads' features side by side. First cut the last axis into "
        "heads, [B, T, H, D]; then move the heads before the tokens. `view` straight to [B, H, "
        "T, D] has the right shape, and reads one token's features as another token.",
    ),
    Rule(
        "step-merge",
        "The heads are merged: [B, H, T, D] becomes [B, T, H·D].",
        "It undoes the split: move the heads back behind the tokens, then join the last two "
        "axes. After a transpose, `view` refuses and `reshape` copies.",
    ),
    Rule(
        "step-mask",
        "The mask hides what comes later, and nothing else.",
        "A mask that is added holds 0 where a key may be seen and -inf where not: exp(-inf) is "
        "0. Key j is hidden from query i where j > i. With P tokens cached, query i stands at "
        "position P + i, and the last query sees the last key.",
    ),
    Rule(
        "step-heads",
        "The heads are modules of their own, in a ModuleList.",
        "What stands in a Python list is not found by parameters(), so it is neither trained, "
        "moved nor saved. The same head several times is one head.",
    ),
    Rule(
        "step-linear",
        "`linear` is a sum of products for each row.",
        "A matrix times a vector: number i of the result is row i times x, added up.",
    ),
    Rule(
        "step-softmax",
        "`softmax` gives shares that add up to 1.",
        "exp makes every score positive, the division makes them shares. exp(1000) is too large "
        "for a float; taking the largest score from all of them first changes nothing else, "
        "since exp(s - m) / Σ exp(s - m) = exp(s) / Σ exp(s).",
    ),
    Rule(
        "step-attention",
        "The attention itself is right.",
        "Scores are queries times keys over √D. What comes later is hidden, softmax makes each "
        "row shares, and the values are added up in these shares.",
    ),
    Rule(
        "step-forward",
        "The parts are put together, and the shape is kept.",
        "Project, split, attend, merge, project: [B, T, E] comes out as it went in, so that "
        "layers can stand on each other.",
    ),
    Rule(
        "step-whole",
        "All parts together are the attention of the step.",
        "Right parts can be put together wrongly: query where key belongs, or a part left out. "
        "So the whole is checked by every rule, on sizes in which no two axes are alike.",
    ),
)

ALL: dict[str, Rule] = {rule.id: rule for rule in (*RULES.values(), *FILE_RULES, *STEP_RULES)}


def lesson(rule: str) -> str:
    """The lesson on one rule: what holds where it is kept, and why.

    Raises:
        ValueError: there is no such rule; the nearest ones are named, or all of them.

    >>> print(lesson("step-linear"))
    step-linear: `linear` is a sum of products for each row.
    <BLANKLINE>
    A matrix times a vector: number i of the result is row i times x, added up.
    """
    if rule not in ALL:
        near = difflib.get_close_matches(rule, ALL, n=3)
        said = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(ALL)}"
        raise ValueError(f"--explain {rule}: there is no such rule; {said}")
    found = ALL[rule]
    return f"{found.id}: {found.says}\n\n{found.lesson}"
