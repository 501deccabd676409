# SPDX-License-Identifier: Apache-2.0
"""Rules from a client's name patterns, the ``universal_checkpoint_info`` that the stock converter uses.

They are read as by ``merge_tp_slices`` (deepspeed/checkpoint/ds_to_universal.py): ``re.match``, an affine map first,
then replicated, averaged, two halves, sub-parameters, row-parallel, and a concatenation along dim 0 for all the rest.
But patterns are unanchored and their dots are rarely escaped, so one may match a parameter that its author never had in
mind. Such matches are reported as doubts, and :mod:`megads_ucp.sources.resolve` demands a better source for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AFFINE_MAP_PARAMS,
    AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    ORIGINAL_VOCAB_SIZE,
    PARAMETER_TO_AVERAGE_PATTERNS,
    PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    PARAMETER_WITH_SUB_PARAMS,
    SUB_PARAM_SHARD_WIDTHS,
    TP_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    VOCABULARY_PARAMETER_PATTERNS,
)
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from megads_ucp.errors import LayoutError
from megads_ucp.layout.rule import Rule, Shapes, check_affine_version
from megads_ucp.sources.sub_params import sub_param_rule

DEFAULT = "name patterns (stock default: cat_dim 0)"


@dataclass(frozen=True)
class PatternRules:
    """What name patterns say about a model's parameters.

    Attributes:
        stated: rules of parameters that some pattern matches (the rule that the stock converter would follow).
        defaults: rules of the others: split along dim 0, the stock converter's silent assumption.
        vocabulary: real rows (``original_vocab_size``) of parameters that a vocabulary pattern matches.
        doubts: why a parameter's patterns must not be its only source.
        unused: patterns that match no parameter here. With pipeline stages, only those unused on all of them matter.
    """

    stated: Mapping[str, Rule]
    defaults: Mapping[str, Rule]
    vocabulary: Mapping[str, int]
    doubts: Mapping[str, str]
    unused: frozenset[str]


def rules_from_patterns(
    info: Mapping[str, Any], names: Sequence[str], shard_shapes: Mapping[str, Shapes]
) -> PatternRules:
    """Read a client's ``universal_checkpoint_info`` for parameters and the shapes of their shards.

    There are no defaults where it describes no layout at all at TP > 1: it then belongs to another model, or to none.

    Raises:
        LayoutError: the information itself is unusable. What is wrong for one parameter only becomes a doubt.
    """
    check_affine_version(info)
    layouts = list(_layout_patterns(info))
    vocabulary_patterns = list(info.get(VOCABULARY_PARAMETER_PATTERNS, ()))
    matches = _all_matches({p.pattern for p in layouts} | {*vocabulary_patterns}, names)
    matching: dict[str, list[_Pattern]] = {name: [] for name in names}
    for pattern in layouts:
        for name in matches[pattern.pattern].names:
            matching[name].append(pattern)
    vocabularies = {name: pattern for pattern in vocabulary_patterns for name in matches[pattern].names}

    stated, defaults, doubts = {}, {}, {}
    for name in names:
        shapes = [tuple(shape) for shape in shard_shapes[name]]
        rule, reasons = _read(matching[name], shapes)
        if rule:
            stated[name] = rule
        elif not reasons and shapes[0] and (layouts or len(shapes) == 1):
            defaults[name] = Rule("split", DEFAULT, dim=0)
        patterns = [p.pattern for p in matching[name]] + ([vocabularies[name]] if name in vocabularies else [])
        reasons += [f"pattern {p!r} {why}" for p in dict.fromkeys(patterns) if (why := matches[p].accident(name))]
        if reasons:
            doubts[name] = "; ".join(reasons)
    vocabulary = {
        name: _vocabulary_size(info, name)
        for name, pattern in vocabularies.items()
        if matches[pattern].accident(name) is None
    }
    needed = {p.pattern for p in layouts if not p.is_affine}.union(vocabulary_patterns)
    unused = frozenset(pattern for pattern in needed if not matches[pattern].names)
    return PatternRules(stated, defaults, vocabulary, doubts, unused)


@dataclass(frozen=True)
class _Pattern:
    """One pattern of a list, and how that list describes a parameter with shards of some shapes (or LayoutError)."""

    pattern: str
    describe: Callable[[Shapes], Rule]
    is_affine: bool = False


def _layout_patterns(info: Mapping[str, Any]) -> Iterator[_Pattern]:
    """All patterns but the vocabulary's, in the stock converter's order of precedence."""

    def plain(key: str, describe: Callable[[str, Shapes], Rule]) -> Iterator[_Pattern]:
        for pattern in info.get(key, ()):
            yield _Pattern(pattern, partial(describe, f"name pattern {pattern!r} in {key}"))

    for pattern, reason in info.get(AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS, {}).items():
        yield _Pattern(pattern, partial(_refuse, reason), is_affine=True)
    for pattern, affine in info.get(AFFINE_MAP, {}).get(AFFINE_MAP_PARAMS, {}).items():
        rule = Rule("affine", f"name pattern {pattern!r} in {AFFINE_MAP}", affine=affine)
        yield _Pattern(pattern, partial(_always, rule), is_affine=True)
    yield from plain(TP_REPLICATED_PARAMETER_PATTERNS, lambda source, shapes: Rule("replicated", source))
    yield from plain(PARAMETER_TO_AVERAGE_PATTERNS, lambda source, shapes: Rule("averaged", source))
    yield from plain(PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, _two_halves)
    widths = info.get(SUB_PARAM_SHARD_WIDTHS, {})
    version = info.get(UNIVERSAL_CHECKPOINT_VERSION_KEY, 0.0)
    for entry in info.get(PARAMETER_WITH_SUB_PARAMS, ()):
        spec = SubparamShape(**entry)
        for pattern in spec.patterns:
            source = f"name pattern {pattern!r} in {PARAMETER_WITH_SUB_PARAMS}"
            yield _Pattern(pattern, partial(sub_param_rule, source, spec, widths.get(pattern), version))
    yield from plain(PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, lambda source, shapes: Rule("split", source, dim=1))


def _always(rule: Rule, shapes: Shapes) -> Rule:
    return rule


def _refuse(reason: str, shapes: Shapes) -> Rule:
    raise LayoutError(f"AutoTP cannot describe it: {reason}")


def _two_halves(source: str, shapes: Shapes) -> Rule:
    if any(not shape or shape[0] % 2 for shape in shapes):
        raise LayoutError(f"{source} says that shards are two equal halves along dim 0, but they are {list(shapes)}")
    widths = tuple(shape[0] // 2 for shape in shapes)
    shard_widths = None if len(set(widths)) == 1 else (widths, widths)
    sizes = (sum(widths),) * 2
    return Rule("split", source, dim=0, sub_sizes=sizes, shard_widths=shard_widths, style="n_sub_params")


def _read(matching: Sequence[_Pattern], shapes: Shapes) -> tuple[Rule | None, list[str]]:
    """The first matching pattern's rule, and reasons for doubt: other patterns differ, or it does not fit."""
    # An affine map supersedes the lists beside it, which are there for older converters only.
    valid = [pattern for pattern in matching if pattern.is_affine] or matching
    try:
        rules = [pattern.describe(shapes) for pattern in valid]
    except LayoutError as error:
        return None, [str(error)]
    if any(rule != rules[0] for rule in rules):
        return rules[0], [f"it is matched by several rules: {', '.join(rule.source for rule in rules)}"]
    return (rules[0] if rules else None), []


def _vocabulary_size(info: Mapping[str, Any], name: str) -> int:
    size = info.get(ORIGINAL_VOCAB_SIZE)
    if size is None:
        raise LayoutError(
            f"{name}: universal_checkpoint_info lists it in {VOCABULARY_PARAMETER_PATTERNS}, but without "
            f"{ORIGINAL_VOCAB_SIZE} padding and real rows look alike. Add the tokenizer's vocabulary size there."
        )
    return int(size)


@dataclass(frozen=True)
class _Matches:
    """What one pattern matches in a model, and which of those matches look like accidents."""

    pattern: str
    names: Sequence[str]
    in_full: frozenset[str]

    def accident(self, name: str) -> str | None:
        """Why the match of ``name`` is likely unintended, as a predicate of the pattern; None if it is not."""
        if name in self.in_full:
            return None
        match = re.match(_as_meant(self.pattern), name)
        if match is None:
            return "matches it only because a dot in it stands for any character"
        if self.in_full:
            return f"is in full {min(self.in_full)} and matches this longer name by its beginning only"
        if name[match.end() :][:1] not in (".", "") and not match[0].endswith("."):
            return f"matches it only up to the middle of a word ({match[0]!r})"
        return None


def _all_matches(patterns: Iterable[str], names: Sequence[str]) -> dict[str, _Matches]:
    # Generated patterns are exact, one per parameter; trying each on each name would take minutes for large models.
    exact = {rf"^{re.escape(name)}$": name for name in names}
    return {
        pattern: _Matches(pattern, [exact[pattern]], frozenset([exact[pattern]]))
        if pattern in exact
        else _matches(pattern, names)
        for pattern in patterns
    }


def _matches(pattern: str, names: Sequence[str]) -> _Matches:
    try:
        loose, meant = re.compile(pattern), re.compile(_as_meant(pattern))
    except re.error as error:
        raise LayoutError(f"universal_checkpoint_info holds the invalid pattern {pattern!r}: {error}.") from error
    matched = [name for name in names if loose.match(name)]
    return _Matches(pattern, matched, frozenset(name for name in matched if meant.fullmatch(name)))


def _as_meant(pattern: str) -> str:
    """The pattern as its author most likely meant it: a dot that stands alone separates components of a name."""
    return re.sub(r"(?<!\\)\.(?![*+?{])", r"\\.", pattern)
