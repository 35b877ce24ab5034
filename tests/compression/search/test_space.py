from __future__ import annotations

import pytest

from archipel.compression import FineTune, QuantizationAware
from archipel.compression.recipe import PARTS, check_parts, kind_of, parse_recipe, write_recipe
from archipel.compression.search.space import FORMS, SHARES, STRUCTURE, TRAINED_AFTER, Space


@pytest.mark.parametrize("training", [True, False])
def test_every_choice_is_a_recipe_that_a_file_holds(training: bool) -> None:
    space = Space.of(training)
    base = {name: values[0] for name, values in space.choices.items()}
    assert space.recipe(base) == []
    for name, values in space.choices.items():
        for value in values:
            recipe = space.recipe({**base, name: value})
            if recipe:
                assert parse_recipe(write_recipe(recipe)) == check_parts(recipe)
                assert not any(isinstance(part, FineTune) for part in recipe)


def test_all_registered_parts_that_are_known_here_are_offered() -> None:
    kinds = {kind_of(part) for part in PARTS}
    space = Space.of(training=True)
    offered = {kind_of(type(part)) for part in space.forms.values()} | {
        kind_of(k) for k, *_ in space.structure.values()
    }
    known = {kind for kind, _ in FORMS.values()} | {kind for kind, _ in STRUCTURE.values()}
    assert offered == known & kinds
    assert "static_int8" in offered


def test_fine_tuning_only_where_something_changed() -> None:
    space = Space.of(training=True)
    base = {name: values[0] for name, values in space.choices.items()}
    many = {"epochs": 4, "epochs_after": 2, "lr": 1e-3}
    assert space.recipe({**base, **many}) == []
    trained = space.recipe({**base, **many, "form": "int8"})
    assert [kind_of(type(part)) for part in trained] == ["static_int8", "quantization_aware"]
    assert trained[1] == QuantizationAware(FineTune(epochs=2, lr=1e-4, batch_norm="frozen"))
    trained = space.recipe({**base, **many, "form": "weights int8"})
    assert trained[1:] == [FineTune(epochs=2, lr=1e-4, batch_norm="frozen")]
    for name in space.structure:
        recipe = space.recipe({**base, **many, name: SHARES[4], "form": "int8"})
        kinds = [kind_of(type(part)) for part in recipe]
        assert kinds == [STRUCTURE[name][0], "fine_tune", "static_int8", "quantization_aware"]
        assert recipe[1] == FineTune(epochs=4, lr=1e-3)
        screened = space.recipe(space.screened({**base, **many, name: SHARES[4], "form": "int8"}))
        assert screened == [recipe[0], recipe[2]]


def test_without_training_data_nothing_is_trained_and_no_gradient_needed() -> None:
    space = Space.of(training=False)
    assert "epochs" not in space.choices
    base = {name: values[0] for name, values in space.choices.items()}
    for name in space.structure:
        [part] = space.recipe({**base, name: 0.5})
        assert getattr(part, "criterion", "l1") == "l1"
    for kind, _, others in Space.of(training=False, calibrated=False).structure.values():
        assert ("data_aware" in others) is (kind_of(kind) == "low_rank")


def test_without_calibration_no_static_ranges() -> None:
    forms = Space.of(training=False, calibrated=False).forms
    assert not {kind_of(type(part)) for part in forms.values()} & {"static_int8"}


def test_anchors_are_each_form_by_itself() -> None:
    space = Space.of(training=True)
    assert [space.recipe(anchor) for anchor in space.anchors] == [[form] for form in space.forms.values()]
    assert {"static_int8"} <= TRAINED_AFTER
