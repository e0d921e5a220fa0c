from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.commands.trees import Drawing, draw, label


def word(token: int) -> str:
    return f"t{token}"


def test_the_committed_tokens_stand_in_one_column_and_the_rest_beside_them():
    tree = Drawing(tokens=[0, 1, 2, 3, 4, 5, 6], parents=[-1, 0, 0, 1, 2, 4, 4], path=[0, 1, 3], final=9)
    assert draw(tree, word, "step 7").splitlines() == [
        "step 7: 6 nodes, 2 accepted",
        "  > 't0'",
        "  | - 't2' 't4'",
        "  |   - 't5'",
        "  |   - 't6'",
        "  + 't1'",
        "  + 't3'",
        "  = 't9'",
    ]


def test_a_root_alone_is_drawn():
    assert draw(Drawing([5], [-1], [0], 6), word, "s").splitlines() == ["s: 0 nodes, 0 accepted", "  > 't5'", "  = 't6'"]


def test_labels_stay_on_one_line_and_short():
    assert label("\n\t") == "'\\n\\t'"
    assert len(label("x" * 100)) <= 24


@given(st.data(), st.integers(1, 65))
@settings(deadline=None)
def test_every_node_of_any_tree_is_drawn_once(data, count):
    parents = [-1] + [data.draw(st.integers(0, i - 1)) for i in range(1, count)]
    path = [0]
    while children := [i for i, p in enumerate(parents) if p == path[-1]]:
        choice = data.draw(st.sampled_from([None, *children]))
        if choice is None:
            break
        path.append(choice)
    text = draw(Drawing(range(count), parents, path, final=count), word, "s")
    for node in range(count + 1):
        assert text.count(f"'t{node}'") == 1
    committed = [line for line in text.splitlines()[1:] if line[2] in ">+="]
    assert committed == [f"  {'>' if i == 0 else '+'} 't{node}'" for i, node in enumerate(path)] + [f"  = 't{count}'"]
