# SPDX-License-Identifier: Apache-2.0
"""What all ranks together hold: every rank describes itself once, and every rank gets the same picture.

Data-parallel replicas describe themselves identically, so only one rank of each (stage, tensor-parallel rank) sends its
description; the others send a digest of theirs. A survey is used again as long as no digest changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from megads_ucp.errors import LayoutError, PlanError
from megads_ucp.exchange import Channel
from megads_ucp.layout.autotp import rules_from_autotp
from megads_ucp.layout.core import Layout, build_layout
from megads_ucp.layout.megatron_core import ATTRIBUTES, rules_from_attributes, rules_from_sharded_state_dict
from megads_ucp.layout.patterns import DEFAULT, PatternRules, rules_from_patterns
from megads_ucp.layout.resolve import Claim, Trust, resolve
from megads_ucp.layout.rule import Rule
from megads_ucp.live import MASTER, Coordinates, LiveState
from megads_ucp.partition import FlatGroup, Fragment
from megads_ucp.plan import Holding, StateSpec, Subject

UNOWNED = -1
"""Group index of frozen parameters and buffers, which no optimizer owns."""


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
        warnings: what the layers could not say, and why.
    """

    coordinates: Coordinates
    groups: tuple[GroupDescription, ...]
    unowned: tuple[tuple[str, tuple[int, ...]], ...]
    buffers: tuple[str, ...]
    claims: tuple[Claim, ...]
    info: Mapping[str, Any] | None
    warnings: tuple[str, ...]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The TP-local shape of everything the rank holds, by name."""
        owned = {m.name: s for g in self.groups for m, s in zip(g.flat.members, g.shapes, strict=True)}
        return {**dict(self.unowned), **owned}

    def digest(self) -> int:
        """62 bits that two equal descriptions share."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "big") >> 2


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
        """Every parameter that is exported, in an order all ranks share; of tied stages, the first one's."""
        found: dict[str, Subject] = {}
        for stage, layouts in enumerate(self.layouts):
            peers = [d for d in self.descriptions if d.coordinates.stage == stage]
            for name, subject in _subjects_of_stage(peers, layouts):
                found.setdefault(name, subject)
        return tuple(found.values())


def describe(live: LiveState, info: Mapping[str, Any] | None, exclude: Collection[str] = ()) -> RankDescription:
    """This rank's description, without the unowned tensors named in ``exclude``.

    Raises:
        LayoutError: a layer says something that its own tensors contradict.
    """
    groups = tuple(
        GroupDescription(
            flat=group.flat,
            shapes=tuple(group.shapes[member.name] for member in group.flat.members),
            ranks=group.ranks,
            states=tuple((name, value.dtype) for name, value in group.sharded_states().items()),
        )
        for group in live.groups
    )
    unowned = tuple((name, tuple(value.shape)) for name, value in live.unowned().items() if name not in exclude)
    buffers = tuple(name for name, _ in unowned if name not in live.parameters)
    layers = rules_from_sharded_state_dict(live.module, live.parameters)
    claims = (
        Claim("megatron-core", Trust.LAYERS, layers.rules),
        Claim("AutoTP", Trust.LAYERS, rules_from_autotp(live.module, live.parameters)),
        Claim(ATTRIBUTES, Trust.ATTRIBUTES, rules_from_attributes(live.parameters, live.coordinates.tp_degree)),
    )
    return RankDescription(live.coordinates, groups, unowned, buffers, claims, info, tuple(layers.warnings))


class Surveyor:
    """Keeps an engine's channel and its latest survey; renews the survey when some rank's description has changed."""

    def __init__(self, timeout_minutes: int) -> None:
        self._timeout_minutes = timeout_minutes
        self._seen: list[list[int]] = []
        self._survey: Survey | None = None

    @cached_property
    def channel(self) -> Channel:
        """Made when it is first used; that is collective, as is all of its use."""
        return Channel(self._timeout_minutes)

    def survey(self, description: RankDescription, first_of_replicas: bool) -> Survey:
        """The survey of all ranks, the same object as long as nothing has changed. Collective.

        Raises:
            PlanError: two data-parallel replicas describe themselves differently.
            LayoutError: a parameter's layout is unknown or contradictory.
        """
        place = description.coordinates
        seen = self.channel.all_gather_ints([place.stage, place.tp_rank, int(first_of_replicas), description.digest()])
        if self._survey is None or seen != self._seen:
            self._survey = self._renew(description, seen)
            self._seen = seen
        return self._survey

    def _renew(self, description: RankDescription, seen: list[list[int]]) -> Survey:
        first = {(stage, tp): rank for rank, (stage, tp, is_first, _) in reversed(list(enumerate(seen))) if is_first}
        for rank, (stage, tp, _, digest) in enumerate(seen):
            speaker = first.get((stage, tp))
            if speaker is None or seen[speaker][3] != digest:
                raise PlanError(
                    f"rank {rank} (pipeline stage {stage}, tensor-parallel rank {tp}) describes its parameters, groups "
                    f"or optimizer states differently from rank {speaker}, its data-parallel replica. Build the same "
                    "model and the same parameter groups on all of them."
                )
        descriptions = tuple(self.channel.broadcast(description, first[place]) for place in sorted(first))
        return build_survey(descriptions)


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
    patterns = [_pattern_rules(peers, theirs) for peers, theirs in zip(stages, shapes, strict=True)]
    # A pattern for the embedding matches nothing on the last stage: only what no stage knows is unused.
    unused = frozenset.intersection(*(theirs.unused for theirs in patterns))
    layouts, warnings = [], [warning for peers in stages for peer in peers for warning in peer.warnings]
    for peers, theirs, named in zip(stages, shapes, patterns, strict=True):
        buffers = {name: Rule("replicated", "buffers are not cut") for name in peers[0].buffers}
        claims = [
            *peers[0].claims,
            Claim("name patterns", Trust.PATTERNS, named.stated, named.doubts),
            Claim(DEFAULT, Trust.DEFAULT, {**named.defaults, **buffers}),
        ]
        resolution = resolve(
            list(theirs),
            theirs,
            claims,
            tp_degree=peers[0].coordinates.tp_degree,
            vocabulary=named.vocabulary,
            unused_patterns=unused,
        )
        layouts.append({name: build_layout(name, rule, theirs[name]) for name, rule in resolution.rules.items()})
        warnings.extend(resolution.warnings)
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
        for mine, theirs in zip(peers[0].claims, peer.claims, strict=True):
            if differing := [name for name in mine.rules if mine.rules[name] != theirs.rules.get(name)]:
                raise LayoutError(
                    f"tensor-parallel ranks 0 and {peer.coordinates.tp_rank} disagree on the layout of "
                    f"{differing[0]} (source: {mine.source})."
                )
    return {name: tuple(shapes[name] for shapes in by_rank) for name in names}


def _pattern_rules(peers: list[RankDescription], shapes: Mapping[str, tuple[tuple[int, ...], ...]]) -> PatternRules:
    info = peers[0].info
    if info is None:
        return PatternRules({}, {}, {}, {}, frozenset())
    names = [name for name in shapes if name not in peers[0].buffers]
    return rules_from_patterns(info, names, shapes)


def _subjects_of_stage(peers: list[RankDescription], layouts: Mapping[str, Layout]) -> Iterator[tuple[str, Subject]]:
    """The stage's parameters with everybody who holds a part of them, in the order of the groups."""
    for group in peers[0].groups:
        for member in group.flat.members:
            holdings: list[Holding] = []
            for peer in peers:
                where, theirs = _find(peer, member.name)
                holdings.extend(
                    Holding(theirs.ranks[shard_rank], peer.coordinates.tp_rank, where, fragment)
                    for shard_rank, fragment in theirs.flat.holders(member.name)
                )
            states = tuple(StateSpec(n, dtype, torch.float32 if n == MASTER else dtype) for n, dtype in group.states)
            yield member.name, Subject(layouts[member.name], states, tuple(holdings))
    spec = (StateSpec(MASTER, torch.float32, torch.float32),)
    for name, _ in peers[0].unowned:
        whole: list[Holding] = []
        for peer in peers:
            numel = torch.Size(dict(peer.unowned)[name]).numel()
            if numel:
                whole.append(
                    Holding(peer.groups[0].ranks[0], peer.coordinates.tp_rank, UNOWNED, Fragment(name, numel, 0, 0))
                )
        yield name, Subject(layouts[name], spec, tuple(whole), owned=False)


def _find(peer: RankDescription, name: str) -> tuple[int, GroupDescription]:
    """The group of ``peer`` that ``name`` is in. Empty shards are in none, as DeepSpeed leaves them out."""
    for index, group in enumerate(peer.groups):
        if any(member.name == name for member in group.flat.members):
            return index, group
    raise LayoutError(
        f"parameter {name} is trained on tensor-parallel rank 0 but not on rank {peer.coordinates.tp_rank}."
    )
