"""Tables of GLUE as they are published: what is read, what is refused, and the metrics against their definitions."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed import DataError
from megatron.tasks.glue import TASKS, accuracy, f1, glue_metrics, matthews, pearson, read_glue_samples, spearman
from tests.helpers.architecture import ROOT

REAL = ROOT.parent / "shared/data/eval/mnli"
MNLI = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2\tlabel1\tgold_label"
ROW = "{}\ta\tb\tc\td\te\tf\tg\t{}\t{}\t{}\t{}"
FILES = {
    "MNLI": MNLI + "\n" + ROW.format(7, "It rains .", "It is wet .", "neutral", "entailment"),
    "QQP": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n7\t1\t2\tIt rains .\tIt is wet .\t1",
    "QNLI": "index\tquestion\tsentence\tlabel\n7\tIt rains .\tIt is wet .\tnot_entailment",
    "RTE": "index\tsentence1\tsentence2\tlabel\n7\tIt rains .\tIt is wet .\tnot_entailment",
    "WNLI": "index\tsentence1\tsentence2\tlabel\n7\tIt rains .\tIt is wet .\t1",
    "MRPC": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tIt rains .\tIt is wet .",
    "SST-2": "sentence\tlabel\nIt rains .\t1",
    "CoLA": "gj04\t1\t\tIt rains .",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
    "7\ta\tb\t2012\t1\tc\td\tIt rains .\tIt is wet .\t1.000",
}


def table(folder: Path, text: str, name: str = "dev.tsv") -> Path:
    """A file with that text."""
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("name", TASKS)
def test_every_task_reads_its_published_table(tmp_path: Path, name: str) -> None:
    (sample,) = read_glue_samples(name, table(tmp_path, FILES[name] + "\n"))
    assert sample.first == "It rains ."
    assert sample.second == ("It is wet ." if len(TASKS[name].texts) == 2 else None)
    assert sample.label == 1
    assert sample.uid == "7" or "uid" not in FILES[name]


def test_a_file_without_labels_is_read_without_labels(tmp_path: Path) -> None:
    text = "index\tpromptID\tpairID\tgenre\tp1\tp2\tp3\tp4\tsentence1\tsentence2\n3\ta\tb\tc\td\te\tf\tg\tOne .\tTwo ."
    (sample,) = read_glue_samples("MNLI", table(tmp_path, text))
    assert (sample.uid, sample.first, sample.second, sample.label) == ("3", "One .", "Two .", None)


def test_every_bad_line_is_named_with_what_was_expected(tmp_path: Path) -> None:
    lines = [
        MNLI,
        ROW.format(0, "A .", "B .", "", "neutral"),
        ROW.format(1, "A .", "B .", "", "maybe"),
        "2\tfew columns",
        ROW.format(3, " ", "B .", "", "neutral"),
    ]
    path = table(tmp_path, "\n".join(lines))
    with pytest.raises(DataError) as caught:
        read_glue_samples("MNLI", path)
    said = str(caught.value)
    assert f"{path}:3: label 'maybe', expected one of contradiction, entailment, neutral" in said
    assert f"{path}:4: 2 columns, expected 12" in said
    assert f"{path}:5: the column sentence1 is empty" in said
    assert f"{path}:2" not in said


def test_numbers_outside_the_scale_are_named(tmp_path: Path) -> None:
    path = table(tmp_path, "sentence1\tsentence2\tscore\nA .\tB .\t2.75\nA .\tB .\t5.1\nA .\tB .\tnan\nA .\tB .\tmuch")
    with pytest.raises(DataError) as caught:
        read_glue_samples("STS-B", path)
    said = str(caught.value)
    assert all(
        f"{path}:{line}: label {word!r}, expected a number from 0 to 5" in said
        for line, word in ((3, "5.1"), (4, "nan"), (5, "much"))
    )
    assert f"{path}:2" not in said
    (sample,) = read_glue_samples("STS-B", table(tmp_path, "sentence1\tsentence2\tscore\nA .\tB .\t2.75", "one.tsv"))
    assert sample.label == 2.75


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = table(tmp_path, "index\tsentence1\tlabel\n1\tA\tneutral")
    with pytest.raises(DataError, match="needs the columns sentence2, and the header has: index, sentence1, label"):
        read_glue_samples("MNLI", path)


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "needs the columns"), (b"\xff\xfe\x00", "not UTF-8"), (MNLI.encode(), "no sample")]
)
def test_files_without_samples_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "dev.tsv").write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_glue_samples("MNLI", tmp_path / "dev.tsv")
    with pytest.raises(DataError, match="cannot be read"):
        read_glue_samples("MNLI", tmp_path / "other.tsv")


@pytest.mark.skipif(not REAL.exists(), reason="the real rows are not beside this checkout")
@pytest.mark.parametrize("name", ["train", "dev_matched", "dev_mismatched", "test_matched", "test_mismatched"])
def test_the_real_rows_are_read(name: str) -> None:
    samples = read_glue_samples("MNLI", REAL / f"{name}.tsv")
    assert all(sample.first and sample.second for sample in samples)
    assert all((sample.label is None) == name.startswith("test") for sample in samples)


def test_metrics_are_those_of_their_definitions() -> None:
    for pairs in itertools.islice(itertools.product([(0, 0), (0, 1), (1, 0), (1, 1)], repeat=5), 0, None, 7):
        found, true = zip(*pairs)
        n = len(pairs)
        assert accuracy(pairs) == sum(a == b for a, b in pairs) / n
        mean_f, mean_t = sum(found) / n, sum(true) / n
        covariance = sum((a - mean_f) * (b - mean_t) for a, b in pairs)
        spread = (sum((a - mean_f) ** 2 for a in found) * sum((b - mean_t) ** 2 for b in true)) ** 0.5
        assert matthews(pairs) == pytest.approx(covariance / spread if spread else 0.0)
        hits = sum(a * b for a, b in pairs)
        precision, recall = (hits / sum(side) if sum(side) else 0.0 for side in (found, true))
        assert f1(pairs) == pytest.approx(2 * precision * recall / (precision + recall) if hits else 0.0)
    assert glue_metrics(TASKS["CoLA"], [(1, 1), (0, 0)]) == {"matthews": 1.0, "accuracy": 1.0}


@pytest.mark.parametrize("tied", [False, True])
def test_correlations_are_those_of_their_definitions(tied: bool) -> None:
    random = np.random.default_rng(3)
    true = random.integers(0, 6, 40).astype(float) if tied else random.uniform(0, 5, 40)
    found = true**3 + random.normal(0, 20, 40).round(0 if tied else 6)
    pairs = list(zip(found.tolist(), true.tolist()))
    mean_f, mean_t = found.mean(), true.mean()
    covariance = sum((a - mean_f) * (b - mean_t) for a, b in pairs)
    assert pearson(pairs) == pytest.approx(
        covariance / (sum((a - mean_f) ** 2 for a in found) * sum((b - mean_t) ** 2 for b in true)) ** 0.5
    )

    def ranks(
        numbers: np.ndarray,
    ) -> np.ndarray:  # by counting: how many are smaller, and half of the others that are equal
        return np.array([(numbers < one).sum() + ((numbers == one).sum() + 1) / 2 for one in numbers])

    by_rank = np.corrcoef(ranks(found), ranks(true))[0, 1]
    assert spearman(pairs) == pytest.approx(by_rank)
    if not tied:  # Spearman's own formula, for ranks without ties
        assert spearman(pairs) == pytest.approx(1 - 6 * ((ranks(found) - ranks(true)) ** 2).sum() / (40 * (40**2 - 1)))


def test_rank_correlation_is_whole_where_the_order_is_right() -> None:
    pairs = [(value**3, value) for value in (0.5, 4.0, 2.0, 3.0)]
    assert spearman(pairs) == pytest.approx(1.0) and pearson(pairs) < 0.99
    assert spearman([(-a, b) for a, b in pairs]) == pytest.approx(-1.0)
    assert pearson([(1.0, 0.0), (1.0, 5.0)]) == 0.0, "what never changes tells nothing"
