# SPDX-License-Identifier: Apache-2.0
"""One rule per parameter out of what several sources claim.

The highest trust wins. A lower source that says otherwise is overridden, with one warning in all that lists what was.
One that only says more (sub-parameters of what attributes call one block, copies that are to be averaged) is followed.
It is an error if two sources of equal trust disagree, or if a parameter has no source, or none but a doubtful one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from megads_ucp.errors import LayoutError
from megads_ucp.layout.build import build_layout
from megads_ucp.layout.rule import Rule

_SHOWN = 10  # lines of a message about many parameters


Shapes = Sequence[tuple[int, ...]]  # of one parameter's shards, per TP rank


class Trust(IntEnum):
    """How far a source is believed."""

    DEFAULT = 0  # a convention and nobody's statement: overridden without a word
    PATTERNS = 1  # the client's name patterns
    INTEGRATION = 2  # our own knowledge of a client
    ATTRIBUTES = 3  # the layers' attributes: where a parameter is cut, though not always how finely
    LAYERS = 4  # the layers' own full description


@dataclass(frozen=True)
class Claim:
    """What one source says: rules by parameter name. ``doubts``: why, for some, it must not be the only source."""

    source: str
    trust: Trust
    rules: Mapping[str, Rule]
    doubts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Resolution:
    """The rules to build Layouts from, for every parameter asked for, and warnings for the user."""

    rules: Mapping[str, Rule]
    warnings: tuple[str, ...]


def resolve(
    names: Sequence[str],
    shard_shapes: Mapping[str, Shapes],
    claims: Iterable[Claim],
    *,
    tp_degree: int,
    vocabulary: Mapping[str, int] | None = None,
    unused_patterns: Iterable[str] = (),
) -> Resolution:
    """Chooses a rule for each of ``names``, whose shards have ``shard_shapes[name][tp_rank]``.

    vocabulary       the real rows of parameters with a padded vocabulary. The padding is cut, whichever source
                     describes the geometry.
    unused_patterns  name patterns that match no parameter of any pipeline stage. No harm, unless a parameter at TP > 1
                     rests on the stock converter's default alone, which is what a mistyped pattern would leave it to.

    Raises LayoutError that lists every parameter without a trustworthy rule, why, and what to do.
    """
    ordered = sorted(claims, key=lambda claim: -claim.trust)
    unused = sorted(unused_patterns)
    chosen: dict[str, Rule] = {}
    problems: dict[str, str] = {}
    overridden: list[_Override] = []
    for name in names:
        verdict = _decide(name, shard_shapes[name], ordered, tp_degree)
        if isinstance(verdict, str):
            problems[name] = verdict
        elif verdict.by_default and unused and tp_degree > 1:
            problems[name] = f"no pattern matches it, while these match nothing: {_list(unused)}"
        else:
            chosen[name] = _with_vocabulary(verdict.rule, (vocabulary or {}).get(name))
            overridden += [_Override(name, loser, verdict.rule) for loser in verdict.overridden]
    if problems:
        raise _unresolved(problems, shard_shapes)
    return Resolution(chosen, (_warning(overridden),) if overridden else ())


@dataclass(frozen=True)
class _Override:
    name: str
    loser: Rule
    winner: Rule


@dataclass(frozen=True)
class _Verdict:
    """A parameter's rule. ``by_default``: nobody said so, and the tensors are put together along dim 0."""

    rule: Rule
    overridden: tuple[Rule, ...] = ()
    by_default: bool = False


def _decide(name: str, shapes: Shapes, ordered: Sequence[Claim], tp_degree: int) -> _Verdict | str:
    """The verdict on one parameter, or why there is none."""
    stated = [claim for claim in ordered if name in claim.rules and claim.trust > Trust.DEFAULT]
    sure = [claim for claim in stated if name not in claim.doubts]
    if not sure:
        doubts = [claim.doubts[name] for claim in ordered if name in claim.doubts]
        return "; ".join(doubts) or _by_default(name, shapes, ordered, tp_degree)
    top = sure[0]
    rule = top.rules[name]
    for other in sure[1:]:
        if other.trust == top.trust and not _agree(name, rule, other.rules[name], shapes):
            return f"{_says(rule)}, but {_says(other.rules[name])}, and both are trusted equally"
    lower = [claim for claim in stated if claim.trust < top.trust]
    finer = _finer(name, rule, top.trust, lower)
    if finer is not None and name in finer.doubts:
        return f"{_says(rule)}; whether in sub-parameters is in doubt: {finer.doubts[name]}"
    chosen = rule if finer is None else finer.rules[name]
    # Who says less (replicated of what is averaged, one block of what is several) is refined, not overridden.
    # An affine map can be compared with either.
    losers = [claim.rules[name] for claim in lower if not _agree(name, chosen, claim.rules[name], shapes)]
    if chosen.kind != "affine":
        losers = [loser for loser in losers if not _refines(chosen, loser)]
    return _Verdict(chosen, tuple(losers))


def _finer(name: str, rule: Rule, trust: Trust, lower: Sequence[Claim]) -> Claim | None:
    """The claim of lower trust that tells more about the parameter than ``rule``, and does not contradict it."""
    # Whether copies drift apart is a matter of how they are trained. Layers call all copies replicated; only the
    # client can know better.
    if rule.kind == "replicated":
        sure = (claim for claim in lower if name not in claim.doubts)
        return next((claim for claim in sure if _refines(claim.rules[name], rule)), None)
    # Attributes know no sub-parameters where a client keeps them to itself, so the next source may say more.
    if trust == Trust.ATTRIBUTES and lower and _refines(lower[0].rules[name], rule):
        return lower[0]
    return None


def _by_default(name: str, shapes: Shapes, ordered: Sequence[Claim], tp_degree: int) -> _Verdict | str:
    for claim in ordered:
        if name in claim.rules:
            rule = claim.rules[name]
            return _Verdict(rule, by_default=rule.kind == "split")
    if tp_degree > 1:
        return "no source describes it"
    # Nothing is cut at TP 1, and cat_dim 0 is what the stock converter writes then (it cannot write scalars).
    source = "no tensor parallelism"
    return _Verdict(Rule("split", source, dim=0) if shapes[0] else Rule("replicated", source))


def _with_vocabulary(rule: Rule, rows: int | None) -> Rule:
    return rule if rows is None or rule.vocabulary_size is not None else replace(rule, vocabulary_size=rows)


def _agree(name: str, rule: Rule, other: Rule, shapes: Shapes) -> bool:
    """Whether both rules put every element of these shards in the same place."""
    if rule == other:
        return True
    if rule.kind == other.kind == "split":
        # At TP 1 too: nothing is cut yet, but a later run will cut by what is written now.
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
    """Whether ``finer`` tells the sub-parameters of what ``coarse`` calls one block split along the same dimension, or
    that copies which ``coarse`` calls replicated are to be averaged."""
    if coarse.kind == "replicated":
        return finer.kind == "averaged"
    if coarse.kind != "split" or coarse.style != "plain":
        return False
    return finer.kind == "affine" or (finer.kind == "split" and finer.dim == coarse.dim and finer.style != "plain")


def _says(rule: Rule) -> str:
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


def _warning(overridden: Sequence[_Override]) -> str:
    """One text for all overridden rules: a line per rule and what overrides it, with the parameters concerned."""
    groups: dict[tuple[str, str], list[str]] = {}
    for override in overridden:
        groups.setdefault((_says(override.loser), _says(override.winner)), []).append(override.name)
    lines = [f"  {_list(names, 3)}: {loser}, but {winner}" for (loser, winner), names in groups.items()]
    count = len({override.name for override in overridden})
    return "\n".join(
        [f"Sources differ on the layouts of {count} parameters; the better one is followed:", *_cut(lines)]
    )


_WAYS_OUT = r"""Ways out: build them from Megatron layers, or set `tensor_model_parallel` and `partition_dim` on the
parameters as those do; or name each of them, replicated ones included, in client_state["universal_checkpoint_info"]
with an exact pattern (r"^layers\.0\.weight$"); or let DeepSpeed's AutoTP split the model."""


def _unresolved(problems: Mapping[str, str], shard_shapes: Mapping[str, Shapes]) -> LayoutError:
    lines = [f"  {name}, {_shapes(shard_shapes[name])}: {why}" for name, why in problems.items()]
    title = f"How {len(problems)} parameters are cut over tensor-parallel ranks is not known for certain:"
    return LayoutError("\n".join([title, *_cut(lines), _WAYS_OUT]))


def _shapes(shapes: Shapes) -> str:
    if len(set(shapes)) == 1:
        return f"shape {shapes[0]} on each of {len(shapes)} TP ranks"
    return f"shapes {list(shapes)} on {len(shapes)} TP ranks"


def _cut(lines: Sequence[str]) -> list[str]:
    return [*lines[:_SHOWN], f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else list(lines)


def _list(items: Sequence[str], shown: int = _SHOWN) -> str:
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more
