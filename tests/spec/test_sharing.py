import pytest

from twofold.spec import ConfigError, ProjectionSharing
from twofold.spec.sharing import parse_sharing

QKV, TIED_QK, TIED_KV, TIED_QKV = ProjectionSharing


@pytest.mark.parametrize(
    ("text", "sharing"),
    [
        ("qkv", QKV),
        ("QKV", QKV),
        ("Q-K-V", QKV),
        ("Q≠K≠V", QKV),
        ("q, k, v", QKV),
        ("tied-qk", TIED_QK),
        ("tied_qk", TIED_QK),
        ("Q=K-V", TIED_QK),
        ("Q=KV", TIED_QK),
        ("Q=K≠V", TIED_QK),
        ("Q=K", TIED_QK),
        ("tied-kv", TIED_KV),
        ("TIED_KV", TIED_KV),
        ("Q-K=V", TIED_KV),
        ("Q − K = V", TIED_KV),
        ("Q–K=V", TIED_KV),
        ("QK=V", TIED_KV),
        ("K=V", TIED_KV),
        ("Q≠K=V", TIED_KV),
        ("Q!=K=V", TIED_KV),
        ("QVV", TIED_KV),
        ("tied-qkv", TIED_QKV),
        ("Q=K=V", TIED_QKV),
        (" q = k = v ", TIED_QKV),
        ("(Q=K=V)", TIED_QKV),
    ],
)
def test_every_spelling_is_read_with_and_without_a_plus(text, sharing):
    assert ProjectionSharing.parse(text) is sharing
    assert parse_sharing(text) == (sharing, False)
    assert parse_sharing(f"{text}+") == (sharing, True)


@pytest.mark.parametrize("sharing", ProjectionSharing)
def test_own_names_are_read_back(sharing):
    assert ProjectionSharing.parse(sharing) is sharing
    assert ProjectionSharing.parse(sharing.slug) is sharing
    assert ProjectionSharing.parse(sharing.label) is sharing
    assert parse_sharing(f"({sharing.label})+") == (sharing, True)


def test_what_each_sharing_ties():
    facts = {s.label: (s.ties_query_key, s.ties_key_value, s.num_cached_tensors) for s in ProjectionSharing}
    assert facts == {
        "QKV": (False, False, 2),
        "Q=K-V": (True, False, 2),
        "Q-K=V": (False, True, 1),
        "Q=K=V": (True, True, 1),
    }


@pytest.mark.parametrize("text", ["KV", "kv", " (KV) ", "KV+"])
def test_kv_alone_is_refused_with_the_reason(text):
    with pytest.raises(ConfigError, match="both for Q=K-V and for Q-K=V; write tied-qk or tied-kv"):
        parse_sharing(text)


@pytest.mark.parametrize(("typo", "meant"), [("teid-kv", "tied-kv"), ("Q=K=W", "Q=K=V"), ("tiedqkv", "tied-qkv")])
def test_a_typo_names_the_nearest(typo, meant):
    with pytest.raises(ConfigError, match=f"unknown sharing '{typo}'; did you mean '{meant}'"):
        parse_sharing(typo)


@pytest.mark.parametrize("text", ["", "+", "banana"])
def test_an_unknown_name_lists_what_is_allowed(text):
    with pytest.raises(ConfigError, match=r"qkv \(QKV\), tied-qk \(Q=K-V\), tied-kv \(Q-K=V\), tied-qkv \(Q=K=V\)"):
        parse_sharing(text)


def test_something_that_is_no_name_is_refused():
    with pytest.raises(ConfigError, match="must be a name, not 3"):
        parse_sharing(3)


def test_parse_refuses_a_plus_because_it_would_be_lost():
    with pytest.raises(ConfigError, match="set score_map beside sharing 'tied-kv'"):
        ProjectionSharing.parse("Q-K=V+")
