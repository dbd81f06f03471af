"""The ordering edges of a transfer: the run that needs each, and the cut that takes it out.

``python edges.py`` prints the table of docs/ordering.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import edge_cuts as cut

OFFLOAD, LOAD = cut.OFFLOAD, cut.LOAD


class Edge(NamedTuple):
    number: str
    name: str
    carried_out: str  # by what
    scenario: str  # the method of Scenarios
    cut: Callable[[], cut.Cut]


_EVENTS = "events that the copy waits for"
_ORDERED = "`record_stream` of the copy stream"

EDGES = [
    Edge(
        "1",
        "producer → D2H",
        _EVENTS,
        "producer_to_d2h",
        partial(cut.no_events, OFFLOAD),
    ),
    Edge(
        "2a",
        "D2H → letting go of the storage",
        "seen done",
        "d2h_seen_done_to_letting_go",
        partial(cut.done_at_once, OFFLOAD),
    ),
    Edge(
        "2b",
        "the same with `in_flight_bytes=0`",
        _ORDERED,
        "d2h_to_letting_go_in_order",
        partial(cut.no_record_stream, "copying"),
    ),
    Edge(
        "2c",
        "the same, storage of another stream's pool",
        _ORDERED,
        "d2h_to_letting_go_of_another_pool",
        partial(cut.no_record_stream, "copying"),
    ),
    Edge(
        "3a",
        "D2H → H2D of the same bytes, on unpack",
        "the load waits for the offload",
        "d2h_to_h2d",
        partial(cut.no_copies_before, LOAD),
    ),
    Edge(
        "3b",
        "the same, prefetched",
        "the load waits for the offload",
        "d2h_to_prefetched_h2d",
        partial(cut.no_copies_before, LOAD),
    ),
    Edge(
        "4",
        "allocation → H2D",
        "event recorded after the allocation",
        "allocation_to_h2d",
        partial(cut.no_events, LOAD),
    ),
    Edge(
        "5a",
        "H2D → consumer",
        "the stream of the unpack waits",
        "h2d_to_consumer",
        partial(cut.no_stream_waits, True),
    ),
    Edge(
        "5b",
        "H2D → a second consumer on another stream",
        "that stream waits too",
        "h2d_to_second_consumer",
        partial(cut.no_stream_waits, False),
    ),
    Edge(
        "5c",
        "H2D → consumer on another stream than it was allocated on",
        "that stream waits",
        "h2d_to_consumer_on_another_stream",
        partial(cut.no_stream_waits, False),
    ),
    Edge(
        "5d",
        "that consumer → reuse of the restored storage",
        "`record_stream` of its stream",
        "consumer_on_another_stream_to_letting_go",
        partial(cut.no_record_stream, "restored"),
    ),
    Edge(
        "5e",
        "the same, restored and saved again on another stream",
        "`record_stream` of that stream",
        "restored_and_saved_again_on_another_stream",
        cut.saved_again_forgotten,
    ),
    Edge(
        "6a",
        "H2D → letting go of its destination, graph dropped",
        "the destination's stream waits",
        "h2d_to_letting_go_at_a_drop",
        cut.no_wait_before_release,
    ),
    Edge(
        "6b",
        "the same, a wrong guess that a backward leaves",
        "the destination's stream waits",
        "h2d_to_letting_go_after_a_pass",
        cut.no_wait_before_release,
    ),
    Edge(
        "6c",
        "H2D → reuse of its host block",
        "seen done",
        "h2d_to_reuse_of_its_host_block",
        partial(cut.done_at_once, LOAD),
    ),
    Edge(
        "6d",
        "D2H → reuse of its host block, graph dropped",
        "seen done",
        "d2h_to_reuse_of_its_host_block",
        partial(cut.done_at_once, OFFLOAD),
    ),
    Edge(
        "7a",
        "gather → D2H of a pack",
        "one stream",
        "staged",
        partial(cut.within_device_elsewhere, OFFLOAD),
    ),
    Edge(
        "7b",
        "H2D of a pack → scatter",
        "one stream",
        "staged",
        partial(cut.within_device_elsewhere, LOAD),
    ),
    Edge(
        "7c",
        "copies through staging → its reuse",
        "staging of the copy stream's pool",
        "staged",
        cut.staging_of_the_default_stream,
    ),
    Edge(
        "8a",
        "every stream that wrote the storage → D2H",
        _EVENTS + ", one a stream",
        "another_writer_to_d2h",
        cut.events_of_default_stream_only,
    ),
    Edge(
        "8b",
        "every stream that read the storage when it was saved → letting go",
        _EVENTS + ", and `record_stream`",
        "another_reader_to_letting_go",
        cut.readers_forgotten,
    ),
    Edge(
        "8c",
        "the same, read after it was saved",
        "`record_stream` of every stream it was saved on",
        "another_reader_goes_on",
        cut.not_kept_for_streams,
    ),
    Edge(
        "8d",
        "the same, read and saved again while its copy runs",
        "`record_stream` of every stream it was saved on",
        "another_reader_after_the_copy",
        cut.not_kept_for_streams,
    ),
    Edge(
        "8e",
        "the same, still there and given out while its copy runs",
        "`record_stream` of every stream it was given out on",
        "another_reader_of_what_is_still_there",
        cut.not_kept_for_streams,
    ),
    Edge(
        "9a",
        "D2H → spill of its host block",
        "seen done",
        "behind_the_host_tier",
        partial(cut.done_at_once, OFFLOAD),
    ),
    Edge(
        "9b",
        "fetch from disk → H2D",
        "the load is queued after it",
        "behind_the_host_tier",
        cut.fetches_done_at_once,
    ),
]

_HEAD = ("edge", "", "carried out by", "the run that needs it")


def markdown() -> str:
    rows = [(edge.number, edge.name, edge.carried_out, f"`{edge.scenario}`") for edge in EDGES]
    lines = [_HEAD, ("---",) * len(_HEAD), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def seen(edge: Edge, wrong: int, raced: int, runs: int) -> str:
    """What a test saw without an edge: in how many of the runs values were wrong, and there was a race."""
    return (
        f"{edge.number:>2}  {edge.name:<62} {edge.scenario:<44} "
        f"wrong values {wrong}/{runs}, race {raced}/{runs}"
    )


if __name__ == "__main__":
    print(markdown(), end="")
