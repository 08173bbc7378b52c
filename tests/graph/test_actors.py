"""Actors with registers: OneFlow's guarantees, makespans derived by hand, and a slow model of time steps."""

from __future__ import annotations

import random

import pytest

from graph.actors import Actor, Input, act
from graph.errors import StrategyError


def chain(durations: list[int], registers: int) -> list[Actor]:
    """Return actors of which each reads the one before it, each on a resource of its own."""
    return [
        Actor(duration, registers, number, (Input(number - 1),) if number else ())
        for number, duration in enumerate(durations)
    ]


@pytest.mark.parametrize(
    ("durations", "makespans"), [([1, 1, 1], [21, 12, 12]), ([1, 2, 3], [51, 33, 33])], ids=str
)
def test_a_second_register_overlaps_an_act_with_its_reader(
    durations: list[int], makespans: list[int]
) -> None:
    assert [act(chain(durations, registers), 10)[-1].end for registers in (1, 2, 3)] == makespans


def test_a_skip_edge_holds_registers_until_its_reader_has_caught_up() -> None:
    def skipping(registers: int) -> list[Actor]:
        return [
            Actor(1, registers, 0),
            Actor(1, 9, 1, (Input(0),)),
            Actor(1, 9, 2, (Input(1),)),
            Actor(1, 9, 3, (Input(2), Input(0))),
        ]

    assert [act(skipping(registers), 20)[-1].end for registers in (1, 2, 3, 4, 5)] == [80, 41, 29, 23, 23]


def test_an_act_of_several_registers_is_less_frequent() -> None:
    acts = act([Actor(1, 3, 0), Actor(2, 1, 1, (Input(0, holds=3),))], 9)
    assert [(one.start, one.end) for one in acts if one.actor == 1] == [(3, 5), (8, 10), (13, 15)]


def test_what_cannot_go_on_is_refused() -> None:
    with pytest.raises(StrategyError, match="actor 1: holds 2 registers of actor 0 at once, which has 1"):
        act([Actor(1, 1, 0), Actor(1, 1, 1, (Input(0, holds=2),))], 3)
    with pytest.raises(
        StrategyError, match="actors 1, 2: wait for each other in a cycle without a first token"
    ):
        act([Actor(1, 1, 0), Actor(1, 1, 1, (Input(2), Input(0))), Actor(1, 1, 2, (Input(1),))], 3)
    with pytest.raises(StrategyError, match="actor 0: has 0 registers, must have at least 1"):
        act([Actor(1, 0, 0)], 3)


def test_a_cycle_goes_on_by_its_first_token() -> None:
    acts = act([Actor(2, 2, 0, (Input(1, tokens=1),)), Actor(3, 1, 1, (Input(0),))], 4)
    assert [(one.actor, one.end) for one in acts] == [(n % 2, 5 * (n // 2) + (2, 5)[n % 2]) for n in range(8)]


def slow_ends(actors: list[Actor], acts: int) -> list[list[int]]:
    """Return when the acts of each actor end, by going through time in steps of one."""
    ends: list[list[int]] = [[] for _ in actors]
    now = 0
    while any(len(own) < acts for own in ends):
        for number, actor in enumerate(actors):
            done = len(ends[number])
            is_busy = any(
                other.resource == actor.resource and ends[place] and ends[place][-1] > now
                for place, other in enumerate(actors)
            )
            readable = all(
                done < item.tokens
                or (
                    len(ends[item.producer]) > done - item.tokens
                    and ends[item.producer][done - item.tokens] + item.latency <= now
                )
                for item in actor.inputs
            )
            full = max(
                (
                    done + item.tokens - sum(end <= now for end in ends[place])
                    for place, other in enumerate(actors)
                    for item in other.inputs
                    if item.producer == number
                ),
                default=0,
            )
            if done < acts and not is_busy and readable and full < actor.registers:
                ends[number].append(now + actor.duration)
        now += 1
    return ends


@pytest.mark.parametrize("seed", range(40))
def test_acts_are_those_of_time_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    actors = []
    for number in range(rng.randint(2, 6)):
        producers = rng.sample(range(number), rng.randint(min(1, number), min(2, number)))
        inputs = tuple(Input(producer, latency=rng.choice([0, 0, 1, 3])) for producer in producers)
        actors.append(Actor(rng.randint(1, 4), rng.randint(1, 3), rng.randrange(4), inputs))
    found = act(actors, 6)
    assert [[one.end for one in found if one.actor == number] for number in range(len(actors))] == slow_ends(
        actors, 6
    )
    assert found == sorted(found)
