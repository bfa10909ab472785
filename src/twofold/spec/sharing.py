"""Which of query, key and value share a projection, and every spelling by which that is known."""

from enum import Enum

from twofold.spec.errors import ConfigError, did_you_mean


class ProjectionSharing(Enum):
    """Which roles share one projection. Values are slugs; `label` is the paper's name, which is not a subtraction."""

    QKV = "qkv"
    TIED_QK = "tied-qk"
    TIED_KV = "tied-kv"
    TIED_QKV = "tied-qkv"

    @property
    def slug(self) -> str:
        """The name for paths and command lines, for example `tied-kv`."""
        return self.value

    @property
    def label(self) -> str:
        """The paper's name, for example `Q-K=V`."""
        return _LABELS[self]

    @property
    def ties_query_key(self) -> bool:
        """True when query and key are one tensor; without separate rotary dims the unmasked scores are symmetric."""
        return self in (ProjectionSharing.TIED_QK, ProjectionSharing.TIED_QKV)

    @property
    def ties_key_value(self) -> bool:
        """True when key and value are one tensor; the cache then holds one tensor a token instead of two."""
        return self in (ProjectionSharing.TIED_KV, ProjectionSharing.TIED_QKV)

    @property
    def num_cached_tensors(self) -> int:
        """Tensors that a layer caches for each token: 1 or 2."""
        return 1 if self.ties_key_value else 2

    @classmethod
    def parse(cls, text: "str | ProjectionSharing") -> "ProjectionSharing":
        """Reads any spelling in circulation; raises `ConfigError` with the nearest name for a typo."""
        sharing, plus = parse_sharing(text)
        if plus:
            raise ConfigError(f"sharing '{text}': '+' adds a score map; set score_map beside sharing '{sharing.slug}'")
        return sharing


_LABELS = {
    ProjectionSharing.QKV: "QKV",
    ProjectionSharing.TIED_QK: "Q=K-V",
    ProjectionSharing.TIED_KV: "Q-K=V",
    ProjectionSharing.TIED_QKV: "Q=K=V",
}

# Spellings after `_fold`: lower case, no spaces or brackets, every kind of dash and inequality sign as "-".
_SPELLINGS = {
    ProjectionSharing.QKV: ("qkv", "q-k-v", "q,k,v"),
    ProjectionSharing.TIED_QK: ("tied-qk", "q=k-v", "q=kv", "q=k"),
    ProjectionSharing.TIED_KV: ("tied-kv", "q-k=v", "qk=v", "k=v", "qvv", "qvv(2)"),
    ProjectionSharing.TIED_QKV: ("tied-qkv", "q=k=v"),
}
_BY_SPELLING = {spelling: sharing for sharing, spellings in _SPELLINGS.items() for spelling in spellings}


def parse_sharing(text: "str | ProjectionSharing") -> tuple[ProjectionSharing, bool]:
    """Reads a sharing and whether the name carried the paper's "+" (a score map).

    Raises:
        ConfigError: for a name that is unknown, or `KV`, which has been used for two different sharings.
    """
    if isinstance(text, ProjectionSharing):
        return text, False
    if not isinstance(text, str):
        raise ConfigError(f"sharing must be a name, not {text!r}; use one of {_allowed()}")
    folded = _fold(text)
    plus = folded.endswith("+")
    folded = folded.rstrip("+")
    if folded.startswith("(") and folded.endswith(")"):
        folded = folded[1:-1]
    if folded == "kv":
        raise ConfigError("sharing 'KV' has been used both for Q=K-V and for Q-K=V; write tied-qk or tied-kv")
    if folded not in _BY_SPELLING:
        names = [sharing.slug for sharing in ProjectionSharing] + list(_LABELS.values())
        raise ConfigError(f"unknown sharing '{text}'{did_you_mean(text, names)} Use one of {_allowed()}")
    return _BY_SPELLING[folded], plus


def _fold(text: str) -> str:
    folded = text.strip().casefold().replace(" ", "").replace("_", "-")
    for sign in ("!=", "≠", "–", "—", "−", "‑"):
        folded = folded.replace(sign, "-")
    return folded


def _allowed() -> str:
    return ", ".join(f"{sharing.slug} ({sharing.label})" for sharing in ProjectionSharing)
