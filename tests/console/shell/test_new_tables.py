"""Tables that a migration creates: their models join those that are rendered, which stay as they are."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.migrations.state import ModelState, ProjectState

from console.shell.new_tables import CreateModel

ID: tuple[str, models.Field[Any, Any]] = ("id", models.BigAutoField(primary_key=True))


def rendered_shop() -> ProjectState:
    """With a box, which is in a room, and both models rendered."""
    state = ProjectState()
    state.add_model(ModelState("shop", "Room", [ID]))
    room = ("room", models.ForeignKey("shop.Room", models.CASCADE))
    state.add_model(ModelState("shop", "Box", [ID, room]))
    assert len(state.apps.get_models()) == 2
    return state


def create(name: str, *fields: tuple[str, models.Field[Any, Any]]) -> CreateModel:
    return CreateModel(name, [ID, *fields])


def test_models_that_it_is_related_to_are_not_rendered_anew_and_know_it() -> None:
    state = rendered_shop()
    apps = state.apps
    box, room = apps.get_model("shop", "Box"), apps.get_model("shop", "Room")
    create("Thing", ("box", models.ForeignKey("shop.Box", models.CASCADE))).state_forwards("shop", state)
    thing = state.apps.get_model("shop", "Thing")
    assert state.apps is apps
    assert (apps.get_model("shop", "Box"), apps.get_model("shop", "Room")) == (box, room)
    assert thing._meta.get_field("box").related_model is box
    assert [one.related_model for one in box._meta.related_objects] == [thing]
    assert {one.name for one in room._meta.related_objects} == {"box"}


def test_one_that_is_related_to_itself_or_to_what_comes_later_is_complete_then() -> None:
    state = rendered_shop()
    parent = ("parent", models.ForeignKey("shop.Shelf", models.CASCADE))
    create("Shelf", parent, ("wall", models.ForeignKey("shop.Wall", models.CASCADE))).state_forwards(
        "shop", state
    )
    create("Wall").state_forwards("shop", state)
    shelf, wall = (state.apps.get_model("shop", name) for name in ("Shelf", "Wall"))
    assert shelf._meta.get_field("parent").related_model is shelf
    assert shelf._meta.get_field("wall").related_model is wall


def test_nothing_is_rendered_where_nothing_was() -> None:
    state = ProjectState()
    create("Thing").state_forwards("shop", state)
    assert "apps" not in state.__dict__
    assert state.apps.get_model("shop", "Thing")._meta.db_table == "shop_thing"


def test_models_of_a_state_that_was_copied_know_the_new_one_too() -> None:
    """So it is in an upgrade: `migrate` copies the models that it has rendered of the release before."""
    before = rendered_shop()
    state = before.clone()
    create("Thing", ("box", models.ForeignKey("shop.Box", models.CASCADE))).state_forwards("shop", state)
    box, thing = (state.apps.get_model("shop", name) for name in ("Box", "Thing"))
    assert {one.related_model for one in box._meta.related_objects} == {thing}
    assert box._meta.get_field("thing").related_model is thing
    assert not hasattr(before.apps.get_model("shop", "Box"), "thing_set")
