# SPDX-License-Identifier: Apache-2.0
"""Rules from a client's name patterns, the ``universal_checkpoint_info`` that the stock converter goes by.

The reading is that of ``merge_tp_slices`` (deepspeed/checkpoint/ds_to_universal.py): ``re.match``, an affine map first,
then replicated, averaged, two halves, sub-parameters, row-parallel, and a concatenation along dim 0 for all the rest.
What differs is the care. Patterns are unanchored and their dots are rarely escaped, so one may match a parameter that
its author never thought of; such matches are reported as doubts, and :mod:`megads_ucp.layout.resolve` needs a better
source for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from deepspeed.checkpoint.affine import AFFINE_MAP_FORMAT_VERSION
from deepspeed.checkpoint.constants import (
    AFFINE_MAP,
    AFFINE_MAP_PARAMS,
    AFFINE_MAP_VERSION,
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
from megads_ucp.layout.rule import Rule

Shapes = Sequence[tuple[int, ...]]  # of one parameter's shards, per TP rank


DEFAULT = "name patterns (stock default: cat_dim 0)"


@dataclass(frozen=True)
class PatternRules:
    """What name patterns say about a model's parameters.

    stated      rules of parameters that some pattern matches (the one that the stock converter would follow).
    defaults    rules of the other ones: split along dim 0, the stock converter's silent assumption.
    vocabulary  real rows (``original_vocab_size``) of parameters that a vocabulary pattern matches.
    doubts      why a parameter's patterns must not be its only source.
    unused      patterns that match no parameter here. With pipeline stages, those unused on all of them matter.
    """

    stated: Mapping[str, Rule]
    defaults: Mapping[str, Rule]
    vocabulary: Mapping[str, int]
    doubts: Mapping[str, str]
    unused: frozenset[str]


def rules_from_patterns(
    info: Mapping[str, Any], names: Sequence[str], shard_shapes: Mapping[str, Sequence[tuple[int, ...]]]
) -> PatternRules:
    """Reads ``info`` for the parameters ``names``, whose shards have ``shard_shapes[name][tp_rank]``.

    There are no defaults where ``info`` names no layout at all at TP > 1: it then describes some other model, or none
    (``--inject_missing_state``), and concatenating everything would be a guess.

    Raises LayoutError where ``info`` itself is unusable; what is wrong for one parameter only becomes a doubt.
    """
    check_affine_version(info)
    layouts = list(_layout_patterns(info))
    vocabulary_patterns = list(info.get(VOCABULARY_PARAMETER_PATTERNS, ()))
    matches = _all_matches({p.pattern for p in layouts} | {*vocabulary_patterns}, names)
    matching: dict[str, list[_Pattern]] = {name: [] for name in names}
    for pattern in layouts:
        for name in matches[pattern.pattern].names:
            matching[name].append(pattern)
    of_vocabulary = {name: pattern for pattern in vocabulary_patterns for name in matches[pattern].names}

    stated, defaults, doubts = {}, {}, {}
    for name in names:
        shapes = [tuple(shape) for shape in shard_shapes[name]]
        rule, reasons = _read(name, matching[name], shapes)
        if rule:
            stated[name] = rule
        elif not reasons and shapes[0] and (layouts or len(shapes) == 1):
            defaults[name] = Rule("split", DEFAULT, dim=0)
        patterns = [p.pattern for p in matching[name]] + ([of_vocabulary[name]] if name in of_vocabulary else [])
        reasons += [f"pattern {p!r} {why}" for p in dict.fromkeys(patterns) if (why := matches[p].accident(name))]
        if reasons:
            doubts[name] = "; ".join(reasons)
    vocabulary = {
        name: _vocabulary_size(info, name)
        for name, pattern in of_vocabulary.items()
        if matches[pattern].accident(name) is None
    }
    needed = {p.pattern for p in layouts if not p.is_affine} | {*vocabulary_patterns}
    unused = frozenset(pattern for pattern in needed if not matches[pattern].names)
    return PatternRules(stated, defaults, vocabulary, doubts, unused)


def check_affine_version(info: Mapping[str, Any]) -> None:
    """Raises LayoutError for affine maps of a later format than this DeepSpeed knows, which could be misread."""
    version = info.get(AFFINE_MAP, {}).get(AFFINE_MAP_VERSION, AFFINE_MAP_FORMAT_VERSION)
    if version > AFFINE_MAP_FORMAT_VERSION:
        raise LayoutError(
            f"universal_checkpoint_info holds affine maps of version {version}, but this DeepSpeed knows none after "
            f"{AFFINE_MAP_FORMAT_VERSION}. Update DeepSpeed."
        )


def _affine_maps(info: Mapping[str, Any]) -> Mapping[str, Any]:
    return info.get(AFFINE_MAP, {}).get(AFFINE_MAP_PARAMS, {})


@dataclass(frozen=True)
class _Pattern:
    """One pattern of a list and how that list describes a parameter: (name, shard shapes) -> Rule, or LayoutError."""

    pattern: str
    describe: Callable[[str, Shapes], Rule]
    is_affine: bool = False


def _layout_patterns(info: Mapping[str, Any]) -> Iterator[_Pattern]:
    """All patterns but the vocabulary's, in the stock converter's order of precedence."""

    def plain(key: str, describe: Callable[[str], Callable[[str, Shapes], Rule]]) -> Iterator[_Pattern]:
        for pattern in info.get(key, ()):
            yield _Pattern(pattern, describe(f"name pattern {pattern!r} in {key}"))

    for pattern, reason in info.get(AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS, {}).items():
        yield _Pattern(pattern, _refusing(reason), is_affine=True)
    for pattern, affine in _affine_maps(info).items():
        rule = Rule("affine", f"name pattern {pattern!r} in {AFFINE_MAP}", affine=affine)
        yield _Pattern(pattern, _always(rule), is_affine=True)
    yield from plain(TP_REPLICATED_PARAMETER_PATTERNS, lambda source: _always(Rule("replicated", source)))
    yield from plain(PARAMETER_TO_AVERAGE_PATTERNS, lambda source: _always(Rule("averaged", source)))
    yield from plain(PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0, _two_halves)
    widths = info.get(SUB_PARAM_SHARD_WIDTHS, {})
    version = info.get(UNIVERSAL_CHECKPOINT_VERSION_KEY, 0.0)
    for entry in info.get(PARAMETER_WITH_SUB_PARAMS, ()):
        spec = SubparamShape(**entry)
        for pattern in spec.patterns:
            yield _Pattern(pattern, _sub_params(pattern, spec, widths.get(pattern), version))
    yield from plain(PARAMETER_WITH_ROW_PARALLELISM_PATTERNS, lambda source: _always(Rule("split", source, dim=1)))


def _always(rule: Rule) -> Callable[[str, Shapes], Rule]:
    return lambda name, shapes: rule


def _refusing(reason: str) -> Callable[[str, Shapes], Rule]:
    def describe(name: str, shapes: Shapes) -> Rule:
        raise LayoutError(f"AutoTP cannot describe it: {reason}")

    return describe


def _two_halves(source: str) -> Callable[[str, Shapes], Rule]:
    def describe(name: str, shapes: Shapes) -> Rule:
        if any(not shape or shape[0] % 2 for shape in shapes):
            raise LayoutError(
                f"{source} says that shards are two equal halves along dim 0, but they are {list(shapes)}"
            )
        half = sum(shape[0] for shape in shapes) // 2
        widths = tuple(shape[0] // 2 for shape in shapes)
        even = len(set(widths)) == 1
        return Rule(
            "split",
            source,
            dim=0,
            sub_sizes=(half, half),
            shard_widths=None if even else (widths, widths),
            style="n_sub_params",
        )

    return describe


def _sub_params(
    pattern: str, spec: SubparamShape, widths: Sequence[Sequence[int]] | None, version: float
) -> Callable[[str, Shapes], Rule]:
    """For one SubparamShape. Its ``shape`` is a view of the parameter and need not have the parameter's dimensions."""
    source = f"name pattern {pattern!r} in {PARAMETER_WITH_SUB_PARAMS}"

    def describe(name: str, shapes: Shapes) -> Rule:
        view_dim = spec.partition_dim
        sizes = _sub_sizes(spec, shapes, version, source)
        held = _shard_widths(sizes, widths, len(shapes), version, source)
        given = [sum(size) if isinstance(size, list | tuple) else size for size in spec.shape]
        given[view_dim] = sum(sizes)
        view = _without_placeholder(given, sum(prod(shape) for shape in shapes), source)
        dim, scale = _dim_of_view(view, view_dim, held, shapes, source)
        as_given = (*spec.shape[:view_dim], sizes, *spec.shape[view_dim + 1 :])
        same_dims = dim == view_dim and scale == 1 and len(view) == len(shapes[0])
        return Rule(
            "split",
            source,
            dim=dim,
            sub_sizes=tuple(size * scale for size in sizes),
            shard_widths=tuple(tuple(width * scale for width in row) for row in held),
            style="sub_param_shape",
            sub_param_shape=as_given if same_dims else None,
            sub_param_patterns=tuple(spec.patterns),
        )

    return describe


def _sub_sizes(spec: SubparamShape, shapes: Shapes, version: float, source: str) -> tuple[int, ...]:
    """Widths of the sub-parameters along the view's partition dim."""
    given = spec.shape[spec.partition_dim]
    if isinstance(given, list | tuple):
        return tuple(given)
    if version >= 0.4:
        raise LayoutError(f"{source} gives {given} at its partition dim, where version {version} has one width each")
    # Before version 0.4 a scalar was the number of equal sub-parameters, as in (3, -1) for a fused QKV.
    if any(len(shape) <= spec.partition_dim for shape in shapes):
        raise LayoutError(f"{source} names partition dim {spec.partition_dim}, but the shards are {list(shapes)}")
    full = sum(shape[spec.partition_dim] for shape in shapes)
    if given < 1 or full % given:
        raise LayoutError(f"{source} says {given} sub-parameters, which do not divide its width {full}")
    return (full // given,) * given


def _shard_widths(
    sizes: tuple[int, ...], widths: Sequence[Sequence[int]] | None, tp_degree: int, version: float, source: str
) -> tuple[tuple[int, ...], ...]:
    """Per sub-parameter, what each TP rank holds of it."""
    if version < 0.4:
        # No widths were recorded then, so only an even split can be told. Anything else would shift every later row.
        uneven = [size for size in sizes if size % tp_degree]
        if uneven:
            raise LayoutError(
                f"{source} records no shard widths (version {version}), and sub-parameters of {uneven} do not divide "
                f"over {tp_degree} TP ranks; give {SUB_PARAM_SHARD_WIDTHS} and version 0.4"
            )
        return tuple((size // tp_degree,) * tp_degree for size in sizes)
    if widths is None:
        raise LayoutError(f"{source} needs its {SUB_PARAM_SHARD_WIDTHS} (version {version})")
    held = tuple(tuple(row) for row in widths)
    if tuple(map(sum, held)) != sizes or any(len(row) != tp_degree for row in held):
        raise LayoutError(f"{source} has sub-parameters {sizes}, but shard widths {held} at TP degree {tp_degree}")
    return held


def _without_placeholder(view: Sequence[int], numel: int, source: str) -> tuple[int, ...]:
    """The view's shape with its one -1, if any, resolved."""
    known = prod(size for size in view if size >= 0)
    placeholders = sum(size < 0 for size in view)
    if placeholders > 1 or not known or numel % known or (not placeholders and numel != known):
        raise LayoutError(f"{source} gives the shape {list(view)}, which {numel} elements do not fill")
    return tuple(numel // known if size < 0 else size for size in view)


def _dim_of_view(
    view: tuple[int, ...], view_dim: int, held: Sequence[Sequence[int]], shapes: Shapes, source: str
) -> tuple[int, int]:
    """The parameter's own dimension that the view's partition dim lies in, and how many of its rows are one of those.

    A view (heads, head_dim, hidden), partition dim 0, is dim 0 of a (heads * head_dim, hidden) weight, scale head_dim.
    """
    # Of dimensions of size 1, which all fit, the one that the view names.
    for dim in sorted(range(len(shapes[0])), key=lambda dim: dim != view_dim):
        outer, inner = prod(shapes[0][:dim]), prod(shapes[0][dim + 1 :])
        scale, remainder = divmod(prod(view[view_dim + 1 :]), inner or 1)
        widths = [sum(row[rank] for row in held) * scale for rank in range(len(shapes))]
        if not remainder and outer == prod(view[:view_dim]) and widths == [shape[dim] for shape in shapes]:
            return dim, scale
    raise LayoutError(f"{source} gives the shape {view}, split as {list(held)}, but the shards are {list(shapes)}")


def _read(name: str, matching: Sequence[_Pattern], shapes: Shapes) -> tuple[Rule | None, list[str]]:
    """The first matching pattern's rule, and what speaks against it: that others differ, or that it does not fit."""
    # An affine map supersedes the lists beside it, which are there for older converters only.
    voices = [pattern for pattern in matching if pattern.is_affine] or matching
    try:
        rules = [voice.describe(name, shapes) for voice in voices]
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
            f"{ORIGINAL_VOCAB_SIZE} padding cannot be told from real rows. Add the tokenizer's vocabulary size there."
        )
    return int(size)


@dataclass(frozen=True)
class _Matches:
    """What one pattern matches in a model, and which of those matches look like accidents."""

    pattern: str
    names: Sequence[str]
    in_full: frozenset[str]

    def accident(self, name: str) -> str | None:
        """Why the match of ``name`` is likely unintended, in words that follow the pattern; None if it is not."""
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
    # Machine-made patterns are exact, one per parameter; trying each on each name would take minutes for large models.
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
