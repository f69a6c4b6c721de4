"""Compare offers of nodes for a training ("places"): own nodes, rented nodes and spot nodes. Each place is tried with
every requested method of training: full training or an adapter such as LoRA."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from bench.core.errors import UserError, suggest_nearest
from bench.core.files import find_group_files
from bench.core.formatting import describe_choice, format_count, format_interval
from bench.core.machine import RentedOffer, list_offers
from bench.predict.advice import AdviceQuestion, HoursInterval, format_hours_interval
from bench.predict.advice.choices import Choice
from bench.sweep.advise.questions import AdviceQuery, parse_query
from bench.sweep.advise.remedies import SEVERAL_NODES
from bench.sweep.advise.search import Answer, find_answer

WORD = "where="
"""Prefix of the argument of `zeroscale advise` that lists the places to compare: own, rented or spot nodes."""
Kind = Literal["own", "rented", "spot"]
_EXAMPLE = "write for example where=own:h100:8:2.5,rented:a3-highgpu-8g,spot:g2-standard-12"
_SET_BY_PLACES = ("machine", "devices_per_node", "price")
_NOT_COMPARED = ("budget", "node_hours", "best")
"""Arguments that a comparison of places does not support. It always looks for the least cost within the deadline."""


class Place(NamedTuple):
    """A type of node on which a training could run (own, rented or spot), with the price of one node."""

    kind: Kind
    machine: str  # file of conf/machine
    devices: int  # of a node
    price_per_hour: float | None  # of a node; None: unknown
    offer: RentedOffer | None = None  # None: an own node
    higher: tuple[str, ...] = ()  # other prices of the node type, as text
    shares_name: bool = False  # another place of the comparison is the same machine with other devices per node

    @property
    def name(self) -> str:
        """Name of the place, such as `spot g2-standard-12`. If another place shares this name, the number of devices
        follows, as in `own h100 (8 devices)`."""
        name = f"{self.kind} {self.offer.machine_type if self.offer else self.machine}"
        return f"{name} ({format_count(self.devices, 'device')})" if self.shares_name else name

    @property
    def currency(self) -> str:
        """Currency of the price; empty for an own node."""
        return self.offer.currency if self.offer else ""

    def compute_cost(self, nodes: int, hours: HoursInterval) -> HoursInterval | None:
        """Return the uncertainty interval of the cost of `nodes` nodes. `hours` is the uncertainty interval of the
        number of hours for which the nodes are needed. None if the price is unknown."""
        if self.price_per_hour is None:
            return None
        return HoursInterval(*(self.price_per_hour * nodes * one for one in hours))


class PlaceRow(NamedTuple):
    """The best layout (engine, batch and node count) for one method of training at one place (a type of node on
    offer)."""

    place: Place
    method: str  # none (full training) or the name of an adapter
    answer: Answer
    hours: HoursInterval
    cost: HoursInterval | None
    kept: bool | None  # whether the deadline is met; None: only the likely time meets it

    def __repr__(self) -> str:
        return f"<PlaceRow {self.describe()}>"

    def describe(self) -> str:
        """Return one line with place, method, hours, cost and layout."""
        cost = f"{format_interval(*self.cost)} {self.place.currency}".rstrip() if self.cost else "cost unknown"
        layout = f"{self.choice.spec.engine.name}, {describe_choice(self.choice.spec)}"
        hours = format_hours_interval(*self.hours)
        return f"{self.place.name}, {describe_method(self.method)}: {hours}, {cost}; {layout}"

    @property
    def choice(self) -> Choice:
        return self.answer.advice.winner

    @property
    def doubt(self) -> int:
        """Degree of doubt about the row. 0: it meets the deadline and fits into memory. 1: it is uncertain whether it
        meets the deadline, or whether it fits. 2: it misses the deadline."""
        return 2 if self.kept is False else 1 if self.kept is None or self.choice.candidate.fits is None else 0


class PlaceTable(NamedTuple):
    """Rows of places (types of own, rented or spot nodes) and methods of training, the best row first. Rows are ordered
    by `doubt`, the degree of uncertainty whether a row meets the deadline and fits into memory. Rows with equal `doubt`
    are ordered by likely cost, and then by likely time."""

    query: AdviceQuery
    question: AdviceQuestion  # with the length in tokens, if the question has one
    rows: list[PlaceRow]
    left_out: list[tuple[str, str]]  # place and method, and the reason why they have no row

    def __repr__(self) -> str:
        head = f"<PlaceTable {format_count(len(self.rows), 'row')}, {len(self.left_out)} left out"
        return "\n  ".join([head, *(row.describe() for row in self.rows)]) + ">"

    def list_cells(self) -> list[dict[str, Any]]:
        """Return a dict of plain values for each row, so that `pandas.DataFrame(table.list_cells())` is a table."""
        return [
            {
                "place": row.place.name,
                "method": row.method,
                "engine": row.choice.spec.engine.name,
                "nodes": row.choice.spec.nodes,
                "devices_per_node": row.choice.spec.devices_per_node,
                "micro": row.choice.spec.batch.micro,
                "accumulation": row.choice.spec.accumulation,
                "activation_checkpointing": row.choice.spec.activation_checkpointing,
                **{f"hours_{end}": hours for end, hours in row.hours._asdict().items()},
                **{f"cost_{end}": getattr(row.cost, end, None) for end in HoursInterval._fields},
                "currency": row.place.currency or None,
                "meets_deadline": row.kept,
                "fits": row.choice.candidate.fits,
            }
            for row in self.rows
        ]

    @property
    def ties(self) -> list[PlaceRow]:
        """Rows that may be cheaper than the first row. The cost interval of each of these rows overlaps the cost
        interval of the first row. The rows have the same `doubt` as the first row: the degree of uncertainty whether a
        row meets the deadline and fits into memory."""
        first, *others = self.rows
        sure = [row for row in others if row.doubt == first.doubt]
        return [row for row in sure if row.cost and first.cost and row.cost.low <= first.cost.high]


def compare_places(texts: Sequence[str], config_dir: Path | None, results: Path | None) -> PlaceTable:
    """Return the table of places for the arguments of `zeroscale advise`, one of which must be `where=…`. Raise
    UserError if no place can run the training."""
    where = [text for text in texts if text.startswith(WORD)]
    rest = [text for text in texts if not text.startswith(WORD)]
    if not where:
        raise UserError("where", "no place is named", _EXAMPLE)
    if len(where) > 1:
        raise UserError(where[1], "where is given twice", "write all places in one list")
    for text in rest:
        name = text.partition("=")[0]
        if name in (*_SET_BY_PLACES, *_NOT_COMPARED):
            rule = "each place sets it" if name in _SET_BY_PLACES else "not supported in a comparison of places"
            raise UserError(text, rule, "remove it")
    places = parse_places(where[0].removeprefix(WORD), config_dir)
    query = parse_query(rest)
    if not (query.question.tokens or query.training.samples or query.training.loss):
        raise UserError("where", "the training has no length", "add samples=100_000")
    known = find_group_files("adapter", config_dir)
    for method in query.adapters:  # an unknown name is a mistake at every place, not a reason to exclude a row
        if method not in known:
            raise UserError(f"adapter={method}", "no such file in conf/adapter", suggest_nearest(method, known))
    rest += [] if query.nodes_given else ["nodes=1"]
    rows: list[PlaceRow] = []
    left_out: list[tuple[str, str]] = []
    for place in places:
        for method in query.adapters:
            try:
                row = _find_row(place, method, rest, config_dir, results)
            except UserError as error:
                left_out.append((f"{place.name}, {describe_method(method)}", str(error)))
                continue
            rows.append(row)
            several = (one.why for one in row.answer.rejected if one.what == SEVERAL_NODES and query.nodes_given)
            left_out += ((f"{place.name}, {describe_method(method)}, {SEVERAL_NODES}", why) for why in several)
    if not rows:
        raise UserError("where", f"no place can do this training; {left_out[0][0]}: {left_out[0][1]}")
    rows.sort(key=lambda row: (row.doubt, row.cost.likely if row.cost else math.inf, row.hours.likely))
    question = rows[0].answer.query.question._replace(deadline_h=query.question.deadline_h)
    return PlaceTable(query, question, rows, left_out)


def describe_method(method: str) -> str:
    """Return the displayed name of a method of training: `full training`, or the name of the adapter."""
    return "full training" if method == "none" else method


def _find_row(
    place: Place, method: str, texts: Sequence[str], config_dir: Path | None, results: Path | None
) -> PlaceRow:
    """Return the row for one place (a type of node on offer) and one method of training. The row has the best layout
    that meets the deadline. If no layout meets the deadline, the row has the fastest layout."""
    kept_texts = [text for text in texts if text.partition("=")[0] != "adapter"]
    own = [f"machine={place.machine}", f"devices_per_node={place.devices}", f"adapter={method}"]
    query = parse_query([*kept_texts, *own])
    try:
        answer = find_answer(query, config_dir, results)
    except UserError:
        if query.question.deadline_h is None:
            raise
        question = query.question._replace(deadline_h=None, best="shortest")
        answer = find_answer(query._replace(question=question), config_dir, results)
    if place.kind == "own" and place.price_per_hour is None and answer.query.price:  # the price in the machine's file
        place = place._replace(price_per_hour=answer.query.price * place.devices)
    winner = answer.advice.winner
    hours = answer.query.question.predict_hours(winner)
    assert hours is not None, "the question has a length"
    kept = answer.query.question._replace(deadline_h=query.question.deadline_h).kept(winner)
    return PlaceRow(place, method, answer, hours, place.compute_cost(winner.spec.nodes, hours), kept)


def parse_places(text: str, config_dir: Path | None) -> list[Place]:
    """Return the places in a list such as `own:h100:8:2.5,rented:a3-highgpu-8g`. An own place consists of machine,
    devices per node and price of a device per hour; a rented or spot place is a node type. Raise UserError for the
    first mistake."""
    places: list[Place] = []
    for item in text.split(","):
        kind, *parts = item.split(":")
        if kind not in get_args(Kind):
            raise UserError(f"{WORD}{item}", "a place begins with own:, rented: or spot:", _EXAMPLE)
        place = _parse_own(item, parts, config_dir) if kind == "own" else _parse_offer(item, kind, parts, config_dir)
        if any(place.name == other.name and place.devices == other.devices for other in places):
            raise UserError(f"{WORD}{item}", "a place is given twice", "remove one of them")
        places.append(place)
    names = Counter(place.name for place in places)
    return [place._replace(shares_name=names[place.name] > 1) for place in places]


def _parse_own(item: str, parts: Sequence[str], config_dir: Path | None) -> Place:
    if not 2 <= len(parts) <= 3 or not parts[0]:
        raise UserError(f"{WORD}{item}", "an own place is own:MACHINE:DEVICES or own:MACHINE:DEVICES:PRICE", _EXAMPLE)
    known = find_group_files("machine", config_dir)
    if parts[0] not in known:
        raise UserError(f"{WORD}{item}", f"no machine {parts[0]}", suggest_nearest(parts[0], known))
    if not parts[1].isdecimal() or int(parts[1]) < 1:
        raise UserError(f"{WORD}{item}", f"{parts[1]!r} is not a number of devices per node", _EXAMPLE)
    if len(parts) == 2:
        return Place("own", parts[0], int(parts[1]), None)
    try:
        price = float(parts[2])
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise UserError(f"{WORD}{item}", f"{parts[2]!r} is not a price of a device per hour above 0", _EXAMPLE)
    return Place("own", parts[0], int(parts[1]), price * int(parts[1]))


def _parse_offer(item: str, kind: str, parts: Sequence[str], config_dir: Path | None) -> Place:
    """Return the place (type of node on offer) for an item such as `spot:g2-standard-12`. `kind` is "rented" or "spot".
    `parts` has the pieces of `item` after the kind, which are separated by colons. Raise UserError unless there is
    exactly one piece, the name of a node type. If machine files have several prices for the node type, the lowest is
    used."""
    if len(parts) != 1 or not parts[0]:
        raise UserError(f"{WORD}{item}", f"a rented place is {kind}:NODE_TYPE", _EXAMPLE)
    offers = list(list_offers(config_dir))
    found = [(machine, offer) for machine, offer in offers if offer.machine_type == parts[0]]
    if not found:
        remedy = suggest_nearest(parts[0], {offer.machine_type for _, offer in offers})
        raise UserError(f"{WORD}{item}", f"no machine file has a price of {parts[0]}", remedy)
    spot = kind == "spot"
    if spot:  # raises if no region has a spot price
        found = [one for one in found if one[1].spot_price_per_hour is not None] or found
    priced = [(offer.find_price(spot=spot), machine, offer) for machine, offer in found]
    (price, machine, offer), *others = sorted(priced, key=lambda one: one[0])
    higher = tuple(f"{one:g} {other.currency} in {other.region} ({name})" for one, name, other in others)
    return Place("spot" if spot else "rented", machine, offer.devices, price, offer, higher)


def describe_price(place: Place) -> str:
    """Return a text with the price of a place (a type of own, rented or spot node) and the source of that price."""
    if place.price_per_hour is None:
        example = f"own:{place.machine}:{place.devices}:2.5"
        return f"unknown; add the price of a device per hour: where={example}"
    if place.offer is None:
        return f"{place.price_per_hour:g} per hour for {format_count(place.devices, 'device')}, as given"
    offer = place.offer
    others = f"; the lowest price, before {', '.join(place.higher)}" if place.higher else ""
    source = f"{offer.source}; read {offer.date}"
    return f"{place.price_per_hour:g} {offer.currency} per hour in {offer.region}; {source}{others}"
