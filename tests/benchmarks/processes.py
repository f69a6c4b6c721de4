"""Generators of simulated step times, which resemble those of real machines. The true mean of each generator is known.
The generators do not depend on the measuring code.

A generator (stochastic process) yields the seconds of successive optimizer steps without end. The simulated machine may
change its speed during a step. The value that a measurement should find is the long-run mean step time, because this
mean determines the cost of hours of training.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Draw = Callable[[np.random.Generator, float], Iterator[float]]
"""Function that yields the seconds of each step. Its arguments are a random generator and the seconds of an undisturbed
step."""
Stretches = Callable[[np.random.Generator], Iterator[tuple[float, float]]]
"""Function that yields (seconds, slowdown) for successive time intervals, in each of which the machine has a constant
speed. The first interval begins at a random time. The argument is a random generator."""

NOISE = 0.01
"""Relative standard deviation of undisturbed steps."""


class Process(NamedTuple):
    """A stochastic process that generates step times. `kind` groups similar processes. `slowdown` is the long-run mean
    step time divided by the time of an undisturbed step."""

    kind: str
    name: str
    draw: Draw
    slowdown: float


def alternate(quiet_s: float, slow_s: float, slowdown: float) -> Stretches:
    """Return a function that yields time intervals, which alternate between full speed and a speed that is lower by the
    factor `slowdown`. Their lengths are exponentially distributed with means `quiet_s` and `slow_s`."""

    def stretches(rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        slow = bool(rng.random() < slow_s / (quiet_s + slow_s))
        while True:
            yield float(rng.exponential(slow_s if slow else quiet_s)), slowdown if slow else 1.0
            slow = not slow

    return stretches


def repeat(quiet_s: float, slow_s: float, slowdown: float) -> Stretches:
    """Return a function that yields time intervals, which alternate between `quiet_s` seconds of full speed and
    `slow_s` seconds of a speed that is lower by the factor `slowdown`. The first interval starts at a random point of
    this cycle."""

    def stretches(rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        at = rng.random() * (quiet_s + slow_s)
        if at < quiet_s:
            yield quiet_s - at, 1.0
            yield slow_s, slowdown
        else:
            yield quiet_s + slow_s - at, slowdown
        while True:
            yield quiet_s, 1.0
            yield slow_s, slowdown

    return stretches


def settle(start: float, tau_s: float) -> Stretches:
    """Return a function that yields time intervals of half a second, whose slowdown decays exponentially from `start`
    to 1 with the time constant `tau_s`."""

    def stretches(rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        at = 0.0
        while True:
            yield 0.5, 1 + (start - 1) * math.exp(-at / tau_s)
            at += 0.5

    return stretches


def work(stretches: Stretches, noise: float = NOISE) -> Draw:
    """Return a function that yields step times of a machine with changing speed. `stretches` yields the length and the
    slowdown of successive time intervals. The speed may also change within a step. The work per step has a relative
    standard deviation of `noise`."""

    def draw(rng: np.random.Generator, step_s: float) -> Iterator[float]:
        states = stretches(rng)
        left_s, slowdown = next(states)
        while True:
            needed, taken = step_s * max(0.1, 1 + noise * rng.standard_normal()), 0.0
            while needed * slowdown > left_s:
                needed -= left_s / slowdown
                taken += left_s
                left_s, slowdown = next(states)
            left_s -= needed * slowdown
            yield taken + needed * slowdown

    return draw


def scatter(multiply: Callable[[np.random.Generator, int], float], noise: float = NOISE) -> Draw:
    """Return a function that yields step times with relative noise `noise`. Each step time is multiplied by a factor,
    which `multiply` computes from a random generator and the step's index."""

    def draw(rng: np.random.Generator, step_s: float) -> Iterator[float]:
        number = 0
        while True:
            yield step_s * multiply(rng, number) * max(0.1, 1 + noise * rng.standard_normal())
            number += 1

    return draw


def resemble(coefficient: float, deviation: float) -> Draw:
    """Return a function that yields autocorrelated step times (first-order autoregression with this coefficient and
    relative standard deviation)."""

    def draw(rng: np.random.Generator, step_s: float) -> Iterator[float]:
        state = rng.standard_normal()
        while True:
            yield step_s * max(0.1, 1 + deviation * state)
            state = coefficient * state + math.sqrt(1 - coefficient**2) * rng.standard_normal()

    return draw


def stall(every_s: float, seconds: float) -> Draw:
    """Return a function that yields step times with stalls of `seconds` seconds at random times, on average one in
    `every_s` seconds. Examples are writing a checkpoint and flushing a full page cache."""

    def draw(rng: np.random.Generator, step_s: float) -> Iterator[float]:
        until_s = rng.exponential(every_s)
        while True:
            own_s = step_s * max(0.1, 1 + NOISE * rng.standard_normal())
            until_s -= own_s
            while until_s < 0:
                own_s += seconds
                until_s += rng.exponential(every_s)
            yield own_s

    return draw


def recompile(within_steps: int, times: int, seconds: float) -> Draw:
    """Return a function that yields step times. Some steps take `seconds` longer, as if a new shape were compiled.
    There are `times` such slow steps, randomly chosen among the first `within_steps` steps."""

    def draw(rng: np.random.Generator, step_s: float) -> Iterator[float]:
        places = set(rng.choice(within_steps, times, replace=False).tolist())
        number = 0
        while True:
            compiled_s = seconds if number in places else 0.0
            yield step_s * max(0.1, 1 + NOISE * rng.standard_normal()) + compiled_s
            number += 1

    return draw


def _slowed(quiet_s: float, slow_s: float, slowdown: float) -> float:
    """Return the long-run mean step time divided by the undisturbed step time. The machine alternates between full
    speed, for `quiet_s` seconds on average, and a speed that is lower by the factor `slowdown`, for `slow_s` seconds on
    average."""
    return (quiet_s + slow_s) / (quiet_s + slow_s / slowdown)


def _pareto(exponent: float, scale: float) -> Callable[[np.random.Generator, int], float]:
    return lambda rng, number: 1 + scale * float(rng.pareto(exponent))


PROCESSES = (
    Process("quiet", "independent, 2 %", scatter(lambda rng, number: 1.0, 0.02), 1.0),
    Process("quiet", "independent, 10 %", scatter(lambda rng, number: 1.0, 0.10), 1.0),
    Process("quiet", "each like the one before by 0.5, 2 %", resemble(0.5, 0.02), 1.0),
    Process("quiet", "each like the one before by 0.9, 2 %", resemble(0.9, 0.02), 1.0),
    Process("stalls", "3 % of steps twice as long", scatter(lambda rng, n: 2.0 if rng.random() < 0.03 else 1.0), 1.03),
    Process("stalls", "each 50th step three times as long", scatter(lambda rng, n: 3.0 if n % 50 == 37 else 1.0), 1.04),
    Process(
        "stalls", "each 500th step ten times as long", scatter(lambda rng, n: 10.0 if n % 500 == 333 else 1.0), 1.018
    ),
    Process("stalls", "a Pareto's tail, exponent 1.5", scatter(_pareto(1.5, 0.02)), 1.04),
    Process("stalls", "a step 30 s longer, twice an hour", stall(1800.0, 30.0), 1 + 30 / 1800),
    Process("bursts", "5 s of 45 s half as long again", work(alternate(40.0, 5.0, 1.5)), _slowed(40, 5, 1.5)),
    Process("clock states", "6 % slower by turns, 30 s each", work(alternate(30.0, 30.0, 1.06)), _slowed(1, 1, 1.06)),
    Process(
        "clock states", "6 % slower by turns, 10 min each", work(alternate(600.0, 600.0, 1.06)), _slowed(1, 1, 1.06)
    ),
    Process("throttling", "10 s of 60 s 20 % slower", work(repeat(50.0, 10.0, 1.2)), _slowed(50, 10, 1.2)),
    Process("recompiles", "3 of 20 s within the first 300 steps", recompile(300, 3, 20.0), 1.0),
    Process("slow heating", "5 % faster while cold, time constant 60 s", work(settle(1 / 1.05, 60.0)), 1.0),
    Process("slow heating", "5 % faster while cold, time constant 150 s", work(settle(1 / 1.05, 150.0)), 1.0),
    Process(
        "background storms", "1 min of 10 min twice as long", work(alternate(540.0, 60.0, 2.0)), _slowed(540, 60, 2)
    ),
)
"""All simulated stochastic processes, ordered by kind. The slow steps of `recompiles` and `slow heating` end after a
while. For these two, the true value is the mean step time after this end."""
