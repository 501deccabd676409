# SPDX-License-Identifier: Apache-2.0
"""What all ranks together hold: every rank describes itself once, and every rank gets the same picture.

Data-parallel replicas describe themselves identically, so only one rank of each (stage, tensor-parallel rank) sends its
description; the others send a digest. A survey is used again as long as no digest changes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from deepspeed.checkpoint.constants import ORIGINAL_VOCAB_SIZE

from megads_ucp.engine.state import Coordinates
from megads_ucp.errors import LayoutError, PlanError
from megads_ucp.layout.layout import Layout, build_layout
from megads_ucp.layout.padding import padding_layout
from megads_ucp.layout.partition import FlatGroup, Member
from megads_ucp.layout.rule import Rule
from megads_ucp.plan.types import UNOWNED, ShardGroup, StateSpec, Subject
from megads_ucp.sources.patterns import DEFAULT, PatternRules, rules_from_patterns
from megads_ucp.sources.resolve import Claim, Trust, check_resolved, resolve
from megads_ucp.storage.format import MASTER


@dataclass(frozen=True)
class GroupDescription:
    """One flat group as every rank of its shard group sees it."""

    flat: FlatGroup
    shapes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    states: tuple[tuple[str, torch.dtype], ...]


@dataclass(frozen=True)
class RankDescription:
    """What the ranks of one (stage, tensor-parallel rank) hold, and what their layers say about it.

    Attributes:
        unowned: (name, shape) of each frozen parameter and buffer.
        buffers: names of those that are buffers.
        claims: what the layers say about their parameters' layouts, by source.
        info: the client's ``universal_checkpoint_info``, if there is one.
        vocabulary: names of parameters that layers call a vocabulary, which may be padded.
        tied: names of the parameters that other stages have copies of, which DeepSpeed keeps equal.
        warnings: what the layers could not say, and why. Quotes foreign exceptions, which may hold anything
            (an address, say), and so without weight when two descriptions are compared.
    """

    coordinates: Coordinates
    groups: tuple[GroupDescription, ...]
    unowned: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[str, ...]
    claims: tuple[Claim, ...]
    info: Mapping[str, Any] | None
    vocabulary: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=(), repr=False)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The TP-local shape of everything the rank holds, by name."""
        owned = {m.name: s for g in self.groups for m, s in zip(g.flat.members, g.shapes, strict=True)}
        return {**dict(self.unowned), **owned}

    def digest(self) -> int:
        """62 bits that equal descriptions share, on whichever rank, and different ones almost surely do not."""
        maps = [rule.affine for claim in self.claims for rule in claim.rules.values()]  # no part of a rule's repr
        content = repr((replace(self, info=None), maps, _canonical(self.info)))
        return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") >> 2


@dataclass(frozen=True)
class Survey:
    """All descriptions, and the layout of every parameter.

    Attributes:
        descriptions: one per (stage, tensor-parallel rank), ordered by both.
        layouts: by stage and parameter name.
        warnings: what the resolution of layouts has to say, once.
    """

    descriptions: tuple[RankDescription, ...]
    layouts: tuple[dict[str, Layout], ...]
    warnings: tuple[str, ...]

    def subjects(self) -> tuple[Subject, ...]:
        """Every parameter that is exported, in an order all ranks share; of tied stages, the first one's.

        The rows that pad vocabularies follow as subjects of their own.

        The other stages' copies are ``tied_shards`` where DeepSpeed ties them. What else a tied module holds, each
        stage trains on its own or not at all.
        """
        found: dict[str, tuple[int, Subject]] = {}
        for stage, layouts in zip(self._stages(), self.layouts, strict=True):
            peers = [d for d in self.descriptions if d.coordinates.stage == stage]
            for name, subject in _subjects_of_stage(peers, layouts):
                first, tied = found.setdefault(name, (stage, subject))
                if (shapes := tied.layout.shard_shapes) != subject.layout.shard_shapes or tied.owned != subject.owned:
                    raise LayoutError(
                        f"parameter {name} is on pipeline stages {first} and {stage}, as tied parameters are, but with "
                        f"shards of shapes {list(shapes)} and {list(subject.layout.shard_shapes)}, or trained on one "
                        "of them only. Give different parameters different names, and freeze both of a tie or neither."
                    )
                if stage != first and name in peers[0].tied:
                    found[name] = first, replace(tied, tied_shards=(*tied.tied_shards, subject.shards))
        subjects = [subject for _, subject in found.values()]
        return (*subjects, *_paddings(subjects))

    def _stages(self) -> list[int]:
        return sorted({description.coordinates.stage for description in self.descriptions})


def build_survey(descriptions: tuple[RankDescription, ...]) -> Survey:
    """Resolve every layout from all descriptions. Pure.

    Raises:
        LayoutError: a parameter's layout is unknown or contradictory, or tensor-parallel ranks hold different ones.
    """
    stages = [
        [description for description in descriptions if description.coordinates.stage == stage]
        for stage in sorted({description.coordinates.stage for description in descriptions})
    ]
    shapes = [_shapes_of_stage(peers) for peers in stages]
    patterns = [_pattern_rules(peers, shards) for peers, shards in zip(stages, shapes, strict=True)]
    # A pattern for the embedding matches nothing on the last stage: only what no stage knows is unused.
    unused = frozenset.intersection(*(rules.unused for rules in patterns))
    resolutions = []
    for peers, shards, named in zip(stages, shapes, patterns, strict=True):
        buffers = {name: Rule("replicated", "buffers are not cut") for name in peers[0].buffers}
        claims = [
            *peers[0].claims,
            Claim("name patterns", Trust.PATTERNS, named.stated, named.doubts),
            Claim(DEFAULT, Trust.DEFAULT, {**named.defaults, **buffers}),
        ]
        resolution = resolve(
            list(shards),
            shards,
            claims,
            tp_degree=peers[0].coordinates.tp_degree,
            vocabulary={**_padded_vocabularies(peers), **named.vocabulary},
            unused_patterns=unused,
        )
        resolutions.append(resolution)
    check_resolved(resolutions)
    layouts = [
        {name: build_layout(name, rule, shards[name]) for name, rule in resolution.rules.items()}
        for resolution, shards in zip(resolutions, shapes, strict=True)
    ]
    warnings = [warning for peers in stages for peer in peers for warning in peer.warnings]
    warnings += [warning for resolution in resolutions for warning in resolution.warnings]
    return Survey(descriptions, tuple(layouts), tuple(dict.fromkeys(warnings)))


def _shapes_of_stage(peers: list[RankDescription]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Each parameter's shard shapes by tensor-parallel rank; the ranks must have the same parameters and rules."""
    degree = peers[0].coordinates.tp_degree
    if [peer.coordinates.tp_rank for peer in peers] != list(range(degree)):
        raise PlanError(
            f"stage {peers[0].coordinates.stage} has tensor-parallel ranks "
            f"{[peer.coordinates.tp_rank for peer in peers]}, but the model-parallel unit says there are {degree}."
        )
    by_rank = [peer.shapes() for peer in peers]
    names = list(dict.fromkeys(name for shapes in by_rank for name in shapes))
    for name in names:
        if absent := [rank for rank, shapes in enumerate(by_rank) if name not in shapes]:
            raise LayoutError(f"parameter {name} is missing on tensor-parallel ranks {absent}; others have it.")
    for peer in peers[1:]:
        for claim, other in zip(peers[0].claims, peer.claims, strict=True):
            if differing := [name for name in claim.rules if claim.rules[name] != other.rules.get(name)]:
                raise LayoutError(
                    f"tensor-parallel ranks 0 and {peer.coordinates.tp_rank} disagree on the layout of "
                    f"{differing[0]} (source: {claim.source})."
                )
    return {name: tuple(shapes[name] for shapes in by_rank) for name in names}


def _pattern_rules(peers: list[RankDescription], shapes: Mapping[str, tuple[tuple[int, ...], ...]]) -> PatternRules:
    info = peers[0].info
    if info is None:
        return PatternRules({}, {}, {}, {}, frozenset())
    names = [name for name in shapes if name not in peers[0].buffers]
    return rules_from_patterns(info, names, shapes)


def _padded_vocabularies(peers: list[RankDescription]) -> dict[str, int]:
    """Real rows of what the layers pad. Layers know that they do; how many rows are real only the client can say."""
    rows = (peers[0].info or {}).get(ORIGINAL_VOCAB_SIZE)
    return {} if rows is None else dict.fromkeys(peers[0].vocabulary, int(rows))


def _paddings(subjects: Iterable[Subject]) -> Iterator[Subject]:
    """The rows that pad vocabularies, held and compared like the rest of these."""
    for subject in subjects:
        if (layout := padding_layout(subject.layout)) is not None:
            yield replace(subject, layout=layout, padding=True)


def _subjects_of_stage(peers: list[RankDescription], layouts: Mapping[str, Layout]) -> Iterator[tuple[str, Subject]]:
    """The stage's parameters with everybody who holds a part of them, in the order of the groups.

    DeepSpeed leaves a shard without elements out of a rank's groups (``filter_empty_parameters`` in
    deepspeed/runtime/utils.py), so what a parameter's states are is asked of those ranks that hold something of it.
    """
    groups, alike = [_group_of_each(peer) for peer in peers], _round_alike(peers)
    shards = [
        [
            ShardGroup(peer.coordinates.tp_rank, index, group.flat, group.ranks)
            for index, group in enumerate(peer.groups)
        ]
        for peer in peers
    ]
    for name in dict.fromkeys(name for group_of in groups for name in group_of):
        layout = layouts[name]
        trained = [(peer, group_of[name]) for peer, group_of in zip(peers, groups, strict=True) if name in group_of]
        first, index = trained[0]
        for peer, group_of in zip(peers, groups, strict=True):
            if name not in group_of and _shard_numel(layout, peer):
                raise LayoutError(
                    f"parameter {name} is trained on tensor-parallel rank {first.coordinates.tp_rank} but not on rank "
                    f"{peer.coordinates.tp_rank}. Freeze it on all of them or on none."
                )
        for peer, other in trained[1:]:
            _check_same_states(name, (first, index), (peer, other))
        states = first.groups[index].states
        for state, _ in states:
            if state != MASTER:
                layout.check_unscaled(state)
        specs = tuple(StateSpec(n, dtype, torch.float32 if n == MASTER else dtype) for n, dtype in states)
        held = tuple(own[group_of[name]] for own, group_of in zip(shards, groups, strict=True) if name in group_of)
        yield name, Subject(layout, specs, held, rounds_alike=alike)
    spec = (StateSpec(MASTER, torch.float32, torch.float32),)
    unowned = [_unowned_shards(peer, layouts) for peer in peers]
    for name, _ in peers[0].unowned:
        if any(name in group_of for group_of in groups):
            continue  # rank 0's shard of it is empty
        held = tuple(of_name[name] for of_name in unowned if name in of_name)
        yield name, Subject(layouts[name], spec, held, owned=False)


def _unowned_shards(peer: RankDescription, layouts: Mapping[str, Layout]) -> dict[str, ShardGroup]:
    """Who exports what no optimizer owns of a tensor-parallel rank's shards, by name; empty shards are left out.

    Frozen parameters are equal on all data-parallel replicas and are dealt out as if ZeRO had cut them. Buffers may
    differ (statistics of a batch), so the first replica's are exported, as by the stock converter.
    """
    ranks = peer.groups[0].ranks
    frozen = [name for name, _ in peer.unowned if name not in peer.buffers]
    found: dict[str, ShardGroup] = {}
    for names, replicas in ((frozen, ranks), (peer.buffers, ranks[:1])):
        members: list[Member] = []
        for name in names:
            if numel := _shard_numel(layouts[name], peer):
                members.append(Member(name, numel, members[-1].stop if members else 0))
        end, degree = members[-1].stop if members else 0, len(replicas)
        flat = FlatGroup(tuple(members), -(-end // degree) * degree, degree)
        shard = ShardGroup(peer.coordinates.tp_rank, UNOWNED, flat, replicas)
        found.update((member.name, shard) for member in members)
    return found


def _round_alike(peers: list[RankDescription]) -> bool:
    """Whether all of a stage's tensor-parallel ranks add up the gradients of their data-parallel ranks in one order.

    Two numbers have one sum. Of more, a ring adds up each part of a buffer in another order, so the buffers must be
    alike; where tensor parallelism is uneven, they are not.
    """
    flats = [[group.flat for group in peer.groups] for peer in peers]
    return flats == flats[:1] * len(flats) or all(len(g.ranks) <= 2 for peer in peers for g in peer.groups)


def _shard_numel(layout: Layout, peer: RankDescription) -> int:
    return prod(layout.shard_shapes[peer.coordinates.tp_rank])


def _group_of_each(peer: RankDescription) -> dict[str, int]:
    """The index of the group of every trained parameter."""
    return {member.name: index for index, group in enumerate(peer.groups) for member in group.flat.members}


def _check_same_states(name: str, first: tuple[RankDescription, int], other: tuple[RankDescription, int]) -> None:
    """Check that two tensor-parallel ranks, each with its group of the parameter, keep the same states of it."""
    (one, here), (two, there) = first, other
    first_states, other_states = dict(one.groups[here].states), dict(two.groups[there].states)
    if first_states != other_states:
        raise PlanError(
            f"parameter {name} has optimizer states {first_states} on tensor-parallel rank "
            f"{one.coordinates.tp_rank} and {other_states} on rank {two.coordinates.tp_rank}. Use the same optimizer, "
            "and take the same steps, on all of them."
        )


def _canonical(value: Any) -> Any:
    """The client's own data in a form with the same repr on every rank: no addresses, no order of hashes."""
    if isinstance(value, Mapping):
        return sorted((repr(key), _canonical(item)) for key, item in value.items())
    if isinstance(value, set | frozenset):
        return sorted(repr(_canonical(item)) for item in value)
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if value is None or isinstance(value, str | bytes | bool | int | float | re.Pattern):
        return value
    return type(value).__qualname__, _canonical(getattr(value, "__dict__", None))
