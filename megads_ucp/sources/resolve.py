# SPDX-License-Identifier: Apache-2.0
"""One rule per parameter out of the claims of several sources.

The highest trust wins. A lower source that contradicts it is overridden, with one warning that lists all such rules. A
lower source that only adds detail (sub-parameters of one block, copies that are to be averaged) is followed. It is an
error if two sources of equal trust disagree, or if a parameter has no source, or only a doubtful one. A model may lie
on several pipeline stages: its rules are resolved stage by stage, and such parameters of all of them are one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megads_ucp.errors import LayoutError
from megads_ucp.layout.layout import build_layout
from megads_ucp.layout.rule import Rule, Shapes

_SHOWN = 10  # lines of a message about many parameters


class Trust(IntEnum):
    """How far a source is believed."""

    DEFAULT = 0  # a mere convention: overridden silently
    PATTERNS = 1  # the client's name patterns
    ATTRIBUTES = 2  # the layers' attributes: where a parameter is cut, though not always how finely
    LAYERS = 3  # the layers' own full description


@dataclass(frozen=True)
class Claim:
    """What a source says: rules by parameter name. ``doubts``: why, for some, it must not be the only source."""

    source: str
    trust: Trust
    rules: Mapping[str, Rule]
    doubts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolution:
    """What became of the claims.

    Attributes:
        rules: to build Layouts from, by parameter name.
        warnings: for the user.
        unresolved: a line for each parameter without a trustworthy rule.
    """

    rules: Mapping[str, Rule]
    warnings: tuple[str, ...]
    unresolved: tuple[str, ...] = ()


def resolve(
    names: Sequence[str],
    shard_shapes: Mapping[str, Shapes],
    claims: Iterable[Claim],
    *,
    tp_degree: int,
    vocabulary: Mapping[str, int] | None = None,
    unused_patterns: Iterable[str] = (),
) -> Resolution:
    """Choose a rule for each parameter.

    Args:
        names: the parameters.
        shard_shapes: per name, shapes of its shards by TP rank.
        claims: of all sources.
        tp_degree: number of tensor-parallel ranks.
        vocabulary: real rows of parameters with a padded vocabulary. The padding is cut, whichever source describes the
            geometry.
        unused_patterns: name patterns that match no parameter of any pipeline stage. Harmless, unless a parameter at
            TP > 1 rests on the stock converter's default alone, as it would after a typo in a pattern.
    """
    ordered = sorted(claims, key=lambda claim: -claim.trust)
    unused = sorted(unused_patterns)
    chosen: dict[str, Rule] = {}
    problems: dict[str, str] = {}
    overridden: list[tuple[str, Rule, Rule]] = []
    for name in names:
        choice = _choose(name, shard_shapes[name], ordered, tp_degree)
        if isinstance(choice, str):
            problems[name] = choice
        elif choice.by_default and unused and tp_degree > 1:
            problems[name] = f"no pattern matches it, while these match nothing: {_list(unused)}"
        else:
            chosen[name] = _with_vocabulary(choice.rule, (vocabulary or {}).get(name))
            overridden += [(name, loser, choice.rule) for loser in choice.overridden]
    lines = (f"  {name}, {_shapes(shard_shapes[name])}: {why}" for name, why in problems.items())
    return Resolution(chosen, (_warning(overridden),) if overridden else (), tuple(lines))


def check_resolved(resolutions: Iterable[Resolution]) -> None:
    """Check that every parameter of all pipeline stages has a rule.

    Raises:
        LayoutError: some have none; the message lists them, why, and what to do.
    """
    lines = list(dict.fromkeys(line for resolution in resolutions for line in resolution.unresolved))
    if lines:
        title = f"How {len(lines)} parameters are cut over tensor-parallel ranks is not known for certain:"
        raise LayoutError("\n".join([title, *_cut(lines), _WAYS_OUT]))


@dataclass(frozen=True)
class _Choice:
    """A parameter's rule, and the rules it overrides; ``by_default``: concatenated along dim 0 for want of a source."""

    rule: Rule
    overridden: tuple[Rule, ...] = ()
    by_default: bool = False


def _choose(name: str, shapes: Shapes, ordered: Sequence[Claim], tp_degree: int) -> _Choice | str:
    """The choice for one parameter, or why there is none."""
    stated = [claim for claim in ordered if name in claim.rules and claim.trust > Trust.DEFAULT]
    sure = [claim for claim in stated if name not in claim.doubts]
    if not sure:
        doubts = [claim.doubts[name] for claim in ordered if name in claim.doubts]
        return "; ".join(doubts) or _by_default(name, shapes, ordered, tp_degree)
    top = sure[0]
    rule = top.rules[name]
    for other in sure[1:]:
        if other.trust == top.trust and not _agree(name, rule, other.rules[name], shapes):
            return f"{_statement(rule)}, but {_statement(other.rules[name])}, and both are trusted equally"
    lower = [claim for claim in stated if claim.trust < top.trust]
    finer = _finer(name, rule, top.trust, lower)
    if finer is not None and name in finer.doubts:
        return f"{_statement(rule)}; whether in sub-parameters is in doubt: {finer.doubts[name]}"
    chosen = rule if finer is None else finer.rules[name]
    # A coarser rule (replicated for averaged, one block for several) is refined, not overridden. An affine map needs no
    # such care, since it can be compared with any rule.
    losers = [claim.rules[name] for claim in lower if not _agree(name, chosen, claim.rules[name], shapes)]
    if chosen.kind != "affine":
        losers = [loser for loser in losers if not _refines(chosen, loser)]
    return _Choice(chosen, tuple(losers))


def _finer(name: str, rule: Rule, trust: Trust, lower: Sequence[Claim]) -> Claim | None:
    """The claim of lower trust that adds detail to ``rule`` without contradicting it."""
    # Whether copies drift apart depends on how they are trained. Layers call all copies replicated; only the client can
    # know better.
    if rule.kind == "replicated":
        sure = (claim for claim in lower if name not in claim.doubts)
        return next((claim for claim in sure if _refines(claim.rules[name], rule)), None)
    # Attributes do not show all sub-parameters, so the next source may add them.
    if trust == Trust.ATTRIBUTES and lower and _refines(lower[0].rules[name], rule):
        return lower[0]
    return None


def _by_default(name: str, shapes: Shapes, ordered: Sequence[Claim], tp_degree: int) -> _Choice | str:
    for claim in ordered:
        if name in claim.rules:
            rule = claim.rules[name]
            return _Choice(rule, by_default=rule.kind == "split")
    if tp_degree > 1:
        return "no source describes it"
    # Nothing is cut at TP 1, and cat_dim 0 is what the stock converter writes then (it cannot write scalars).
    source = "no tensor parallelism"
    return _Choice(Rule("split", source, dim=0) if shapes[0] else Rule("replicated", source))


def _with_vocabulary(rule: Rule, rows: int | None) -> Rule:
    return rule if rows is None or rule.vocabulary_size is not None else replace(rule, vocabulary_size=rows)


def _agree(name: str, rule: Rule, other: Rule, shapes: Shapes) -> bool:
    """Whether both rules put every element of these shards in the same place."""
    if rule == other:
        return True
    if rule.kind == other.kind == "split":
        # At TP 1 too: nothing is cut yet, but a later run will cut by the metadata written now.
        return rule.dim == other.dim and _widths(rule, shapes) == _widths(other, shapes)
    if len(shapes) == 1:
        return True
    if "affine" not in (rule.kind, other.kind):
        return rule.kind == other.kind
    if "averaged" in (rule.kind, other.kind):
        return False
    try:
        maps = [build_layout(name, replace(r, vocabulary_size=None), shapes).affine.to_dict() for r in (rule, other)]
    except LayoutError:
        return False
    return maps[0] == maps[1]


def _widths(rule: Rule, shapes: Shapes) -> tuple[tuple[int, ...], ...] | None:
    """Per sub-parameter, what each TP rank holds of it; None where the rule does not fit the shards."""
    dim, degree = rule.dim, len(shapes)
    if dim is None or any(dim >= len(shape) for shape in shapes):
        return None
    if rule.shard_widths is not None:
        return rule.shard_widths
    if rule.sub_sizes is not None:
        return tuple((size // degree,) * degree for size in rule.sub_sizes)
    if rule.style == "n_sub_params":
        return (tuple(shape[dim] // 2 for shape in shapes),) * 2
    return (tuple(shape[dim] for shape in shapes),)


def _refines(finer: Rule, coarse: Rule) -> bool:
    """Whether ``finer`` adds sub-parameters to a plain split along the same dim, or averages replicated copies."""
    if coarse.kind == "replicated":
        return finer.kind == "averaged"
    if coarse.kind != "split" or coarse.style != "plain":
        return False
    return finer.kind == "affine" or (finer.kind == "split" and finer.dim == coarse.dim and finer.style != "plain")


def _statement(rule: Rule) -> str:
    return f"{rule.source} says {_describe(rule)}"


def _describe(rule: Rule) -> str:
    if rule.kind == "affine":
        return "as in its affine map"
    if rule.kind != "split":
        return rule.kind
    if rule.style == "plain":
        return f"split along dim {rule.dim}"
    if rule.sub_sizes is None:
        return f"split along dim {rule.dim} in two halves"
    return f"split along dim {rule.dim} in sub-parameters of {list(rule.sub_sizes)}"


def _warning(overridden: Sequence[tuple[str, Rule, Rule]]) -> str:
    """One warning for all overridden rules: a line per rule and its winner, with the parameters concerned."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, loser, winner in overridden:
        groups.setdefault((_statement(loser), _statement(winner)), []).append(name)
    lines = [f"  {_list(names, 3)}: {loser}, but {winner}" for (loser, winner), names in groups.items()]
    count = len({name for name, _, _ in overridden})
    return "\n".join(
        [f"Sources differ on the layouts of {count} parameters; the better one is followed:", *_cut(lines)]
    )


_WAYS_OUT = r"""Ways out: build them from Megatron layers, or set `tensor_model_parallel` and `partition_dim` on the
parameters as those do; or name each of them, replicated ones included, in client_state["universal_checkpoint_info"]
with an exact pattern (r"^layers\.0\.weight$"); or let DeepSpeed's AutoTP split the model."""


def _shapes(shapes: Shapes) -> str:
    if len(set(shapes)) == 1:
        return f"shape {shapes[0]} on each of {len(shapes)} TP ranks"
    return f"shapes {list(shapes)} on {len(shapes)} TP ranks"


def _cut(lines: Sequence[str]) -> list[str]:
    return [*lines[:_SHOWN], f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else list(lines)


def _list(items: Sequence[str], shown: int = _SHOWN) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more
