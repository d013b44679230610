import gzip
import json

import pytest

from swiftfp8.data import hubs
from swiftfp8.data.sources import read_entry, registered_datasets
from swiftfp8.errors import SwiftFP8Error

ROWS = [{"instruction": f"q{k}", "output": f"a{k}"} for k in range(5)]


def read(entry, seed=1):
    return read_entry(str(entry), hub="hf", seed=seed)


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def jsonl(tmp_path):
    return write(tmp_path / "rows.jsonl", "\n\n".join(map(json.dumps, ROWS)))


def test_jsonl_rows_know_their_lines(jsonl):
    (rows,) = read(jsonl)
    assert list(rows.rows) == ROWS
    assert [rows.place(k) for k in range(5)] == [f"{jsonl}:{n}" for n in (1, 3, 5, 7, 9)]


def test_line_separators_inside_strings_do_not_shift_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a\u2028b"}\n{"text": "c"}\n')
    (rows,) = read(path)
    assert [row["text"] for row in rows.rows] == ["a\u2028b", "c"]
    assert rows.place(1) == f"{path}:2"


@pytest.mark.parametrize("indent", [None, 2])
def test_json_array_rows_know_their_lines(tmp_path, indent):
    path = write(tmp_path / "rows.json", json.dumps(ROWS, indent=indent))
    (rows,) = read(path)
    assert list(rows.rows) == ROWS
    expected = [1] * 5 if indent is None else [2, 6, 10, 14, 18]
    assert list(rows.lines) == expected


def test_json_file_may_hold_one_object_a_line(tmp_path):
    path = write(tmp_path / "rows.json", "\n".join(map(json.dumps, ROWS)))
    (rows,) = read(path)
    assert list(rows.rows) == ROWS and list(rows.lines) == [1, 2, 3, 4, 5]


def test_csv_with_quoted_line_breaks_and_tsv(tmp_path):
    table = 'instruction,output\n"two\nlines",a\nq,b\n'
    path = write(tmp_path / "rows.csv", table)
    (rows,) = read(path)
    assert [row["instruction"] for row in rows.rows] == ["two\nlines", "q"]
    assert list(rows.lines) == [2, 4]
    tabbed = write(tmp_path / "rows.tsv", "instruction\toutput\nq\ta, b\n")
    assert read(tabbed)[0].rows[0] == {"instruction": "q", "output": "a, b"}


def test_csv_row_with_missing_cells_is_bad(tmp_path):
    (rows,) = read(write(tmp_path / "rows.csv", "instruction,output\nq\nr,b\n"))
    assert [place.where.rsplit(":", 1)[1] for place in rows.bad] == ["2"]
    assert "1 cells under 2 columns" in rows.bad[0].reason


def test_text_files_are_split_at_blank_lines(tmp_path):
    path = write(tmp_path / "book.txt", "\n\none\ntwo\n\n \nthree\n")
    (rows,) = read(path)
    assert [row["text"] for row in rows.rows] == ["one\ntwo", "three"]
    assert list(rows.lines) == [3, 7]


def test_gzip_and_parquet(tmp_path):
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(map(json.dumps, ROWS)).encode()))
    assert list(read(packed)[0].rows) == ROWS
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    (rows,) = read(tmp_path / "rows.parquet")
    assert list(rows.rows) == ROWS and rows.place(0).endswith("rows.parquet, row 1")


def test_folder_reads_every_known_file_but_readmes(tmp_path):
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    write(tmp_path / "b.json", json.dumps(ROWS[1:3]))
    write(tmp_path / "README.txt", "not rows")
    write(tmp_path / "c.pdf", "not rows")
    assert [len(rows.rows) for rows in read(tmp_path)] == [1, 2]


def test_sampling_is_seeded_without_repetition_and_keeps_lines(jsonl):
    drawn = read(f"{jsonl}#3", seed=1)[0]
    assert len(drawn.rows) == 3 == len({row["output"] for row in drawn.rows})
    assert list(drawn.rows) == list(read(f"{jsonl}#3", seed=1)[0].rows)
    others = [list(read(f"{jsonl}#3", seed=seed)[0].rows) for seed in range(2, 8)]
    assert any(list(drawn.rows) != other for other in others)
    for k, row in enumerate(drawn.rows):
        assert drawn.lines[k] == 2 * ROWS.index(row) + 1
    assert len(read(f"{jsonl}#99")[0].rows) == 5


def test_malformed_line_is_a_bad_row_with_its_place(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\n{"text": "open}\n[1]\n')
    (rows,) = read(path)
    assert [place.where for place in rows.bad] == [f"{path}:2", f"{path}:3"]
    assert "malformed JSON" in rows.bad[0].reason and '"open}' in rows.bad[0].reason


def test_lines_that_no_parser_takes_are_bad_rows(tmp_path):
    path = write(tmp_path / "a.jsonl", "[" * 100_000 + '\n{"text": ' + "9" * 5000 + "}\n")
    (rows,) = read(path)
    assert [place.where for place in rows.bad] == [f"{path}:1", f"{path}:2"]
    assert "nested too deeply" in rows.bad[0].reason and "digits" in rows.bad[1].reason


@pytest.mark.parametrize(
    ("name", "text", "line", "what"),
    [
        ("a.json", '[\n{"text": "a"},\n{"text" "b"}\n]', 3, "malformed JSON"),
        ("a.json", '[\n{"text": "a"},\n', 3, "not closed"),
        ("a.json", "[\n" + "[" * 100_000, 2, "nested too deeply"),
        ("a.csv", 'text\nfine\n"open\n', 3, "malformed table"),
        ("a.csv", "text,output,text\na,b,c\n", 1, "two columns are named 'text'"),
        ("a.csv", "question;answer\na;b\n", 1, "the columns are separated by ';'"),
    ],
)
def test_files_that_break_off_are_errors_at_their_line(tmp_path, name, text, line, what):
    path = write(tmp_path / name, text)
    with pytest.raises(SwiftFP8Error, match=what) as caught:
        read(path)
    assert caught.value.where == f"{path}:{line}"


def test_missing_file_suggests_a_neighbour(jsonl):
    with pytest.raises(SwiftFP8Error) as caught:
        read(jsonl.with_name("row.jsonl"))
    assert caught.value.fix == f"did you mean {jsonl}?"
    with pytest.raises(SwiftFP8Error, match="folder does not exist"):
        read(jsonl.parent / "nowhere" / "rows.jsonl")


@pytest.mark.parametrize(
    ("name", "data", "what"),
    [
        ("a.jsonl", b"", "no rows"),
        ("a.json", b"[]", "no rows"),
        ("a.csv", b"text\n", "no rows"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "not UTF-8"),
        ("a.parquet", b"PAR", "not a parquet file"),
        ("a.jsonl.gz", b"plain", "can't be read"),
        ("a.jsonl.gz", gzip.compress(b"plain", mtime=0)[:10] + b"\xff" * 20, "can't be read"),
    ],
)
def test_files_without_usable_content_are_errors(tmp_path, name, data, what):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SwiftFP8Error, match=what):
        read(tmp_path / name)


def test_utf16_is_named_in_the_advice(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}', encoding="utf-16")
    with pytest.raises(SwiftFP8Error) as caught:
        read(path)
    assert "iconv -f utf-16 " in caught.value.fix


def test_unknown_name_suggests_a_registered_one():
    with pytest.raises(SwiftFP8Error) as caught:
        read("quikstart")
    assert caught.value.fix == "did you mean quickstart?"


def test_zero_rows_asked_is_an_error():
    with pytest.raises(SwiftFP8Error, match="0 rows"):
        read("quickstart#0")


def test_registered_datasets_say_whose_they_are_and_can_be_read():
    for name, dataset in registered_datasets().items():
        assert dataset.licence and dataset.description
        if dataset.source.startswith("assets/"):
            assert all(len(rows.rows) for rows in read(name))


def test_hub_ids_go_to_the_hub_with_subset_and_split(monkeypatch):
    asked = []

    def fake(name, subset, split):
        asked.append((name, subset, split))
        return ROWS

    monkeypatch.setattr(hubs, "_from_hf", fake)
    (rows,) = read("someone/some-set:easy#2")
    assert asked == [("someone/some-set", "easy", "train")]
    assert len(rows.rows) == 2 and rows.place(0).startswith("someone/some-set:easy, row ")
    read("someone/some-set:easy@validation#2")
    read("someone/some-set@test")
    assert asked[1:] == [
        ("someone/some-set", "easy", "validation"),
        ("someone/some-set", None, "test"),
    ]


def test_hub_failures_are_one_line_with_what_to_do(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("no route to host\nand a long story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(SwiftFP8Error, match="Face: no route to host\n") as caught:
        read("someone/some-set")
    assert "hub=modelscope" in caught.value.fix


def test_modelscope_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "modelscope.msdatasets", None)
    with pytest.raises(SwiftFP8Error, match="needs the modelscope package"):
        read_entry("someone/some-set", hub="modelscope", seed=1)
