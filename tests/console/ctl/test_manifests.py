"""Manifests: what is read, and what is said where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from console.ctl.changes import merged
from console.ctl.failures import Usage
from console.ctl.manifests import is_same, load, parse
from console.ctl.output import yaml_of


def test_documents_lists_and_json_are_read_alike(tmp_path: Path) -> None:
    folder = tmp_path / "manifests"
    folder.mkdir()
    (folder / "a.yaml").write_text(
        "kind: org\nslug: a\nname: A\n---\n- kind: Org\n  slug: b\n  name: B\n"
    )
    (folder / "b.json").write_text('[\n\t{"kind": "org", "slug": "c", "name": "C"}\n]')
    (folder / "notes.txt").write_text("not a manifest")
    found = load([str(folder)])
    assert [str(one.reference) for one in found] == ["org/a", "org/b", "org/c"]
    assert found[2].fields == {"name": "C"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no manifests"),
        ("kind: org\nslug: a\nslug: b\n", "x.yaml, line 3, column 1: 'slug' is there twice."),
        ("kind: org\n  slug: a\n", "x.yaml, line 2"),
        ("kind: org\nslug: &a b\nname: *a\n", "line 3, column 7: aliases are not read"),
        ("kind: org\nname: " + "[" * 50 + "]" * 50, "nested too deep"),
        ("kind: org\nname: A\n", "`slug` of this org is missing."),
        ("kind: org\nslug: no\nname: A\n", "`slug` of this org is False; put a text in quotes."),
        ("kind: teapot\n", "`kind: teapot` can't be applied"),
        ("kind: [org]\n", "can't be applied"),
        ("slug: a\n", "`kind` is missing. There are: workload"),
        ("just text\n", "a manifest is a mapping"),
        ("kind: org\nslug: a\n---\nkind: org\nslug: a\n", "org/a is there twice"),
        ("kind: job\nname: a\n", "`session` of this job is missing."),
        ("kind: org\nslug: !!python/object:os.system a\n", "x.yaml, line 2"),
        ("\x00", "is not YAML"),
        ("kind: session-rules\nmoves_percent: .nan\n", "x.yaml: `moves_percent` is no number"),
        ("kind: limits\norg: a\nweight: [1, .inf]\n", "x.yaml: `weight` is no number"),
        (f"kind: limits\norg: a\nweight: {1 << 70}\n", "x.yaml: `weight` is no number"),
        ('kind: org\nslug: a\nname: "\\ud800"\n', "x.yaml: `name` is no text"),
        ("kind: org\nslug: a\n? [b]\n: c\n", "x.yaml, line 3, column 3: a name is a text"),
        ("kind: node\nname: a\nlabels: {null: b}\n", "x.yaml, line 3, column 10: a name is a text"),
        ('{"kind": "org", "slug": "a", "name": "A", "name": "B"}', "'name' is there twice"),
        ("kind: org\nslug: a\n---\nkind: org\nslug: b\nnmae: B\n", "x.yaml: a org has no field `nmae`."),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(text)
    with pytest.raises(Usage) as failure:
        load(["x.yaml"])
    assert said in str(failure.value)


def test_files_that_can_not_be_read_are_usage(tmp_path: Path) -> None:
    with pytest.raises(Usage, match="No such file"):
        load([str(tmp_path / "absent.yaml")])
    (tmp_path / "latin.yaml").write_bytes(b"kind: org\nslug: \xff\n")
    with pytest.raises(Usage, match="not UTF-8"):
        load([str(tmp_path / "latin.yaml")])


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=80))
def test_whatever_is_in_a_file_is_read_or_refused(text: str) -> None:
    for prefix in ("", "kind: org\nslug: "):
        try:
            parse(prefix + text, "x")
        except Usage:
            continue  # and nothing else


def test_times_stay_texts() -> None:
    [one] = parse("kind: org\nslug: a\nname: 2026-11-23\n", "x")
    assert one.fields == {"name": "2026-11-23"}


VALUES = st.recursive(
    st.none() | st.integers(0, 3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_a_merge_changes_nothing_twice(there: object, wanted: object) -> None:
    once = merged(there, wanted)
    assert merged(once, wanted) == once


def test_a_merge_is_that_of_rfc_7396() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None, "e": 4}}) == {
        "a": {"c": 2, "e": 4},
        "d": 3,
    }


@pytest.mark.parametrize("said", ["no", "off", "false", "'no'"])
def test_no_is_a_choice_where_the_api_has_it(said: str) -> None:
    [one] = parse(f"kind: session-rules\nborrow: {said}\nrefuse_spine: no\n", "x")
    assert one.fields == {"borrow": "no", "refuse_spine": False}


def test_numbers_may_have_an_exponent_and_texts_like_them_are_quoted() -> None:
    [one] = parse("kind: session-rules\nmoves_percent: 1e30\nboxes_min: -2.5E-1\n", "x")
    assert one.fields == {"moves_percent": 1e30, "boxes_min": -0.25}
    written = yaml_of({"kind": "org", "slug": "a", "name": "1e30"})
    assert "'1e30'" in written
    assert parse(written, "x")[0].fields == {"name": "1e30"}


def test_true_is_not_one() -> None:
    assert not is_same(1, True)
    assert not is_same({"a": [0]}, {"a": [False]})
    assert is_same({"a": [1.0, True]}, {"a": [1, True]})
    assert not is_same([1], [1, 2])
