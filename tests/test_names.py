"""Canonical names: what vanishes, what stays, what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ema_lib.names import (
    WRAPPER_SEGMENTS,
    is_predictive_aux_key,
    normalize_generator_fsdp_key,
    normalize_generator_fsdp_state_dict,
)

settings.register_profile("untimed", deadline=None)  # a shared machine may pause any example
settings.load_profile("untimed")

# `module` among them: a model may own a child of that name, and it has to survive.
components = st.sampled_from(["blocks", "0", "7", "attn", "module", "weight", "aux_head", "_orig_model", "mod"])
plain_names = st.lists(components, min_size=1, max_size=5).map(".".join)
wrappers = st.sampled_from(sorted(WRAPPER_SEGMENTS))


@st.composite
def wrapped_names(draw: st.DrawFn) -> tuple[str, str]:
    """A plain name, and the same with wrapper segments inserted at random places in random order."""
    plain = draw(plain_names)
    wrapped: list[str] = []
    for component in plain.split("."):
        wrapped += [*draw(st.lists(wrappers, max_size=3)), component]
    return plain, ".".join(wrapped)


@given(wrapped_names())
def test_wrapper_segments_vanish_wherever_and_in_whatever_order_they_stand(names):
    plain, wrapped = names
    assert normalize_generator_fsdp_key(wrapped) == plain


@given(wrapped_names())
def test_normalizing_a_key_twice_changes_nothing_more(names):
    once = normalize_generator_fsdp_key(names[1])
    assert normalize_generator_fsdp_key(once) == once


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("_fsdp_wrapped_module.lin._checkpoint_wrapped_module._orig_mod.weight", "lin.weight"),
        ("_orig_mod._fsdp_wrapped_module._flat_param", "_flat_param"),
        ("lin._orig_mod_scale", "lin._orig_mod_scale"),  # only whole components are wrappers
        ("module.weight", "module.weight"),
        ("weight", "weight"),
    ],
)
def test_key(key, expected):
    assert normalize_generator_fsdp_key(key) == expected


@pytest.mark.parametrize(
    ("given_keys", "expected"),
    [
        (["module.a", "module.b.c"], ["a", "b.c"]),
        (["module._orig_mod.a", "module._orig_mod.b"], ["a", "b"]),
        (["_orig_mod.module.a", "_orig_mod.module.b"], ["a", "b"]),
        (["module.a", "head.b"], ["module.a", "head.b"]),  # a child called module, not a wrapper
        (["module.module.a", "module.head.b"], ["module.a", "head.b"]),  # DDP around such a model: one level goes
        (["blocks.module.a"], ["blocks.module.a"]),
        (["module"], ["module"]),  # a parameter called module
        ([], []),
    ],
)
def test_state_dict_drops_module_only_as_a_prefix_of_every_key(given_keys, expected):
    state = {key: object() for key in given_keys}
    normalized = normalize_generator_fsdp_state_dict(state)
    assert list(normalized) == expected
    assert all(mine is theirs for mine, theirs in zip(normalized.values(), state.values(), strict=True))


@given(st.dictionaries(plain_names, st.integers(), max_size=6), st.data())
def test_state_dict_of_a_wrapped_model_equals_that_of_the_plain_one(plain, data):
    def wrap(name):
        return ".".join(part for c in name.split(".") for part in [*data.draw(st.lists(wrappers, max_size=2)), c])

    plain = {f"root.{name}": value for name, value in plain.items()}
    assert normalize_generator_fsdp_state_dict({wrap(name): value for name, value in plain.items()}) == plain
    assert normalize_generator_fsdp_state_dict({f"module.{wrap(n)}": v for n, v in plain.items()}) == plain


def test_the_given_state_dict_is_not_changed():
    state = {"_orig_mod.a": 1}
    normalize_generator_fsdp_state_dict(state)
    assert state == {"_orig_mod.a": 1}


def test_all_collisions_are_named_with_all_their_originals():
    state = {"a.w": 0, "_orig_mod.a.w": 1, "b": 2, "c": 3, "_fsdp_wrapped_module.c": 4}
    with pytest.raises(ValueError) as error:
        normalize_generator_fsdp_state_dict(state)
    text = str(error.value)
    assert "a.w: 'a.w' and '_orig_mod.a.w'" in text
    assert "c: 'c' and '_fsdp_wrapped_module.c'" in text
    assert "'b'" not in text
    assert "keep one of each" in text


def test_a_name_of_wrappers_alone_is_refused():
    with pytest.raises(ValueError, match=r"'_orig_mod._fsdp_wrapped_module' holds wrapper segments alone.*rename"):
        normalize_generator_fsdp_key("_orig_mod._fsdp_wrapped_module")


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(TypeError, match=r"must be a string, got 3 \(int\)"):
        normalize_generator_fsdp_state_dict({3: 0})


@pytest.mark.parametrize(
    ("key", "auxiliary"),
    [
        ("aux", True),
        ("net.aux.weight", True),
        ("aux_head.weight", True),
        ("predictive_head.weight", True),
        ("_fsdp_wrapped_module.predictive_head._orig_mod.weight", True),
        ("net.predictive_.weight", True),
        ("auxiliary.weight", False),
        ("net.my_aux.weight", False),
        ("net.predictive.weight", False),
        ("AUX.weight", False),
        ("weight", False),
    ],
)
def test_default_auxiliary_names(key, auxiliary):
    assert is_predictive_aux_key(key) is auxiliary


def test_patterns_replace_the_default_and_see_the_canonical_name():
    assert is_predictive_aux_key("_orig_mod.heads.extra.0.weight", patterns=["heads.extra.*"])
    assert not is_predictive_aux_key("aux.weight", patterns=["heads.extra.*"])
    assert not is_predictive_aux_key("aux.weight", patterns=[])
    assert not is_predictive_aux_key("Heads.extra.0", patterns=["heads.*"])


def test_one_string_for_patterns_is_refused():
    with pytest.raises(TypeError, match=r"single string 'aux\.\*'; pass \['aux\.\*'\]"):
        is_predictive_aux_key("aux.weight", patterns="aux.*")
