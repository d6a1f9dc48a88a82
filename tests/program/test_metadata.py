"""What a node of a Program carries is its own."""

from torch import fx

from stepgraph.program.metadata import meta, set_meta


def test_nodes_that_shared_a_dictionary_have_their_own():
    graph = fx.Graph()
    one, other = graph.placeholder("one"), graph.placeholder("other")
    other.meta = one.meta  # as torch's partitioner does
    set_meta(one, {"name": "one"})
    set_meta(other, {**meta(one), "name": "other"})
    assert meta(one) == {"name": "one"} and meta(other) == {"name": "other"}


def test_what_is_described_anew_stays_in_its_graph():
    graph = fx.Graph()
    node = graph.call_function(len, ((),))
    kept = {"name": "len"}
    set_meta(node, kept)
    set_meta(node, meta(node))
    meta(node)["phase"] = "forward"
    assert kept == {"name": "len"}
    assert graph.find_nodes(op="call_function", target=len) == [node]
