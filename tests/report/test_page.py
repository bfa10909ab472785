"""The report of a quickstart folder: what it says, and what it says when something is missing."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from twofold.records import RunFolder, read_json, write_json_atomic
from twofold.report import write_report
from twofold.spec import RunFolderError


def text_of(path: Path) -> str:
    """The page's text as a reader sees it, without figures and with plain spaces."""
    page = path.read_text(encoding="utf-8")
    page = re.sub(r"<(style|svg).*?</\1>", "", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", page)).replace("\N{NO-BREAK SPACE}", " "))


def row_of(path: Path, label: str, table: int = 0) -> list[str]:
    """Cells of a variant's row, small print included."""
    body = path.read_text(encoding="utf-8").split("<tbody>")[1 + table].split("</tbody>")[0]
    for row in body.split("<tr")[1:]:
        cells = [
            re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]*>", " ", cell))).strip()
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL)
        ]
        if cells[0] == label:
            return cells
    raise AssertionError(label)


def plot_in_words(path: Path) -> str:
    (label,) = re.findall(r'aria-label="(Perplexity increase.*?)"', path.read_text(encoding="utf-8"))
    return html.unescape(label).replace("\N{NO-BREAK SPACE}", " ")


def test_the_table_holds_every_number(make_folder: Callable) -> None:
    folder = make_folder()
    path = write_report(folder.path, seed_record=folder.seed_record)
    assert path == folder.path / "report.html"
    cells = row_of(path, "Q-K=V")
    assert cells[1:10] == ["989,440", "33.92", "1.640", "+2.4", "+3.1", "2.00", "2.00", "−50", "−50"]
    speed = read_json(folder.path / "quickstart.json")["decode"]["variants"]["tied-kv"]
    milliseconds, tokens = speed["milliseconds_per_token"], speed["tokens_per_second"]
    assert cells[10] == "{median:.2f} {low:.2f}–{high:.2f}".format(**milliseconds)
    assert cells[11] == "{median:.1f} {low:.1f}–{high:.1f}".format(**tokens)
    assert cells[12] == "342"
    assert row_of(path, "QKV")[4:6] == ["–", "–"]
    assert row_of(path, "Q-MQA")[8:10] == ["−93.75", "−96.9"]
    assert row_of(path, "Q-GQA-4 decoupled")[5:10] == ["–", "1.50", "1.50", "−62.5", "–"]


def test_the_answer_is_computed(make_folder: Callable) -> None:
    folder = make_folder()
    path = write_report(folder.path, seed_record=folder.seed_record)
    text = text_of(path)
    assert "Q-K=V halves the KV cache (−50 %) for +2.4 % perplexity in this run." in text
    assert "Q-MQA has the smallest cache: −93.75 %, for +4.8 % perplexity." in text
    assert re.search(r"At 16,384 tokens of context, Q-K=V decodes 1\.\d\d times as fast as QKV", text)
    assert "One seed for each variant, so no interval is drawn" in text
    assert "count the padding of short documents as targets" in text
    assert "of 8 query heads here and of 16 in the paper" in text
    sources = "QKV and Q-K=V from the paper; Q=K-V, Q=K=V, GQA-4, MQA, Q-GQA-4 and Q-MQA from third parties who quote"
    assert sources in re.sub(r" +([,;])", r"\1", text)
    assert "The authors' later pair on FineWeb-Edu, with padding masked: 20.82 → 21.28, +2.2 %." in text
    assert "Q-K=V −50 % cache, +2.4 % perplexity; " in plot_in_words(path)
    assert "untrained copies" in text
    assert "not a fused kernel" in text
    assert "positions are rotary; the paper’s are learned." in text
    assert "ther positions" not in text
    for runs in folder.path.glob("*/run.json"):
        assert read_json(runs)["run_id"] in text


def test_other_positions_than_the_references_are_named(make_folder: Callable) -> None:
    folder = make_folder(positions="learned")
    text = text_of(write_report(folder.path, seed_record=folder.seed_record))
    assert "positions are learned, as in the paper." in text
    assert "Other positions than QKV’s (learned): Q-GQA-4 decoupled (rope)." in text


def test_the_page_needs_nothing_else(make_folder: Callable) -> None:
    folder = make_folder()
    page = write_report(folder.path, seed_record=folder.seed_record).read_text(encoding="utf-8")
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert not re.search(r"url\((?!#)|@import", page)
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))


def test_samples_and_errors_are_escaped(make_folder: Callable) -> None:
    attack = '<script>alert("x")</script> & \x00{{ 7 * 7 }}'
    folder = make_folder(continuations={"qkv": attack}, failed=("mqa",))
    path = write_report(folder.path, seed_record=folder.seed_record)
    page = path.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "\ufffd{{ 7 * 7 }}" in page
    assert "\x00" not in page
    assert row_of(path, "MQA") == ["MQA", "failed: MemoryError: no room for <b>this</b>"]


def test_without_decode_speed(make_folder: Callable) -> None:
    folder = make_folder(decode=False)
    path = write_report(folder.path, seed_record=folder.seed_record)
    assert "Decode speed Not measured yet." in text_of(path)
    assert row_of(path, "QKV")[10:] == ["–", "–", "–"]


def test_without_a_bandwidth_there_is_no_estimate(make_folder: Callable) -> None:
    folder = make_folder()
    data = read_json(folder.path / "quickstart.json")
    data["decode"]["read_bandwidth_gb_s"] = None
    write_json_atomic(folder.path / "quickstart.json", data)
    assert "estimate" not in text_of(write_report(folder.path, seed_record=folder.seed_record))


def test_seeds_give_intervals_and_no_order_within_noise(make_folder: Callable) -> None:
    folder = make_folder()
    folder.write_seeds(spread=0.004)
    path = write_report(folder.path, seed_record=folder.seed_record)
    text = text_of(path)
    assert re.search(r"Q-K=V halves the KV cache \(−50 %\) for \+2\.\d % ± 0\.\d perplexity", text)
    assert "What five seeds can tell" in text
    (mean,) = re.findall(r"Q-K=V −50 % cache, (.*?) perplexity; ", plot_in_words(path))
    assert mean == re.findall(r"\(−50 %\) for (.*?) perplexity", text)[0]
    assert re.fullmatch(r"costs 2\.\d % ± 0\.\d perplexity", row_of(path, "Q-K=V", table=1)[5])
    assert row_of(path, "QKV", table=1)[5] == "the reference"
    assert re.search(r"in no order: .*MQA and Q-GQA-4 decoupled", text)


def test_seeds_that_cannot_tell_say_so(make_folder: Callable) -> None:
    folder = make_folder()
    folder.write_seeds(spread=0.2)
    path = write_report(folder.path, seed_record=folder.seed_record)
    assert "with no difference that five seeds can tell in perplexity" in text_of(path)
    assert row_of(path, "GQA-4", table=1)[5] == "no difference that five seeds can tell"


def test_seeds_of_other_settings_are_not_mixed_in(make_folder: Callable) -> None:
    folder = make_folder()
    for other in ({"learning_rate": 1e-4}, {"data_sha256": "f" * 64}):
        folder.write_seeds(**other)
        text = text_of(write_report(folder.path, seed_record=folder.seed_record))
        assert "record of five seeds was made with other settings or data and is not mixed in" in text
        assert "seeds can tell" not in text
        assert "for +2.4 % perplexity" in text


def test_a_record_speaks_for_runs_with_settings_added_later(make_folder: Callable) -> None:
    """A setting that the record lacks had its default; one that it holds counts, whatever the default is now."""
    folder = make_folder()
    folder.write_seeds()
    record = read_json(folder.seed_record)
    for config in record["configs"].values():
        del config["train"]["beta2"], config["model"]["qk_norm"]
    write_json_atomic(folder.seed_record, record)
    assert "What five seeds can tell" in text_of(write_report(folder.path, seed_record=folder.seed_record))
    record["configs"]["mqa"]["train"]["beta2"] = 0.5
    write_json_atomic(folder.seed_record, record)
    assert "is not mixed in" in text_of(write_report(folder.path, seed_record=folder.seed_record))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"configs": ...}, "has no 'configs'"),
        ({"configs": {"qkv": {"model": {"preset": "gpt-tiny", "later": 1}}}}, "written by another version of twofold"),
    ],
)
def test_a_record_that_cannot_be_read(make_folder: Callable, change: dict, message: str) -> None:
    folder = make_folder()
    folder.write_seeds()
    record = {**read_json(folder.seed_record), **change}
    write_json_atomic(folder.seed_record, {name: value for name, value in record.items() if value is not ...})
    with pytest.raises(RunFolderError, match=message):
        write_report(folder.path, seed_record=folder.seed_record)


def test_runs_without_a_result_are_listed(make_folder: Callable) -> None:
    folder = make_folder(unfinished=("tied-kv", "q-gqa-4-decoupled"), absent=("gqa-4",))
    path = write_report(folder.path, seed_record=folder.seed_record)
    assert row_of(path, "Q-K=V") == ["Q-K=V", "not finished"]
    assert row_of(path, "Q-GQA-4 decoupled") == ["Q-GQA-4 decoupled", "not finished"]
    assert row_of(path, "gqa-4") == ["gqa-4", "not started"]
    assert "Q=K=V halves the KV cache" in text_of(path)


def test_without_the_reference_nothing_is_compared(make_folder: Callable) -> None:
    folder = make_folder(unfinished=("qkv",))
    path = write_report(folder.path, seed_record=folder.seed_record)
    assert "The reference run QKV has no result yet" in text_of(path)
    assert row_of(path, "Q-K=V")[4:6] == ["–", "+3.1"]


def test_nothing_has_begun(make_folder: Callable) -> None:
    folder = make_folder(decode=False)
    data = {**read_json(folder.path / "quickstart.json"), "variants": ["elsewhere"]}
    write_json_atomic(folder.path / "quickstart.json", data)
    assert row_of(write_report(folder.path, seed_record=folder.seed_record), "elsewhere")[1] == "not started"


def test_a_diverged_run_is_no_number(make_folder: Callable) -> None:
    folder = make_folder()
    run = RunFolder.open(folder.path / "mqa")
    result = run.result()
    result["validation"] |= {"loss": float("nan"), "perplexity": float("inf"), "bits_per_byte": float("nan")}
    run.write_result(result)
    run.append_metrics({"step": 1500, "loss": float("nan")})
    cells = row_of(write_report(folder.path, seed_record=folder.seed_record), "MQA")
    assert cells[2:5] == ["diverged", "–", "–"]


def test_the_output_may_lie_elsewhere(make_folder: Callable, tmp_path: Path) -> None:
    folder = make_folder()
    output = tmp_path / "new" / "page.html"
    assert write_report(folder.path, output, seed_record=folder.seed_record) == output
    assert not (folder.path / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "has schema 2"),
        ({"seed": ...}, "has no 'seed'"),
        ({"decode": {"variants": {}}}, "has no 'context'"),
    ],
)
def test_a_quickstart_that_cannot_be_read(make_folder: Callable, change: dict, message: str) -> None:
    folder = make_folder()
    data = {**read_json(folder.path / "quickstart.json"), **change}
    data = {name: value for name, value in data.items() if value is not ...}
    (folder.path / "quickstart.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(RunFolderError, match=message):
        write_report(folder.path, seed_record=folder.seed_record)


def test_a_result_that_lacks_a_number_is_named(make_folder: Callable) -> None:
    folder = make_folder()
    run = RunFolder.open(folder.path / "mqa")
    run.write_result({**run.result(), "cache": {}})
    with pytest.raises(RunFolderError, match=r"mqa.result\.json has no 'cache\.dtype'"):
        write_report(folder.path, seed_record=folder.seed_record)


def test_a_folder_that_is_missing_or_something_else(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"it does not exist; make one with `twofold quickstart`"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"it has no quickstart\.json"):
        write_report(tmp_path)
