from training.run_folder import differing_values


def test_differences_are_named_by_their_dotted_key() -> None:
    before = {"a": {"b": 1, "c": [1, 2]}, "gone": True}
    now = {"a": {"b": 2, "c": [1, 2]}, "new": None, "d": {"e": 1}}
    assert differing_values(before, now) == [("a.b", 1, 2), ("d", None, {"e": 1}), ("gone", True, None)]


def test_equal_values_have_no_differences() -> None:
    assert differing_values({"a": {"b": [1]}}, {"a": {"b": [1]}}) == []
