"""Tokenised texts of these tests stay out of the user's cache."""

import pytest


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(autouse=True)
def own_text_cache(monkeypatch, text_cache):
    monkeypatch.setenv("TWOFOLD_CACHE", str(text_cache))
