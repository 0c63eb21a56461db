"""Every kind of damage to every stage of a whole run: found before the stage is used, named, with the way on."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from roots import FolderRoot, Root

from miles_core.errors import InputError
from miles_core.store.files import DamagedError
from miles_core.store.manifest import Manifest, fingerprint
from miles_core.store.parts import Part, read_bytes, write_file
from miles_core.store.run_store import RunStore
from miles_core.store.stages import STAGES, StageName

FILES: dict[StageName, tuple[str, ...]] = {
    "policy": ("data/policy.parquet", "adapter/pytorch_lora_weights.bin"),
    "prompts": ("data/prompts.parquet", "state.json"),
    "rollout": ("data/00000000-1.parquet", "data/00000001-1.parquet", "conditioning/c.parquet", "probe.bin"),
    "rewards": ("data/00000000-1.parquet", "data/00000001-1.parquet"),
    "advantages": ("data/advantages.parquet",),
    "update": ("data/steps.parquet", "adapter/a.bin", "checkpoint/shard-0.bin", "checkpoint/trainer_state.json"),
    "sync": ("data/engines.parquet",),
}
PARTS = [(stage, name) for stage, names in FILES.items() for name in names]


@pytest.fixture
def root(tmp_path: Path) -> FolderRoot:
    return FolderRoot(tmp_path)


class WholeRun:
    """A committed store: one iteration, every stage with all the kinds of files it has."""

    def __init__(self, root: Root, run: str = "r") -> None:
        self.root, self.store = root, RunStore(root.files, run)
        self.store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
        self.made: dict[StageName, Manifest] = {}
        for stage in FILES:
            self.made[stage] = self.commit(stage)
            self.store.move_line(self.made[stage])

    def upstream(self, stage: StageName) -> dict[str, Manifest]:
        return {name: self.made[name] for name in STAGES[stage].upstream if name != stage}

    def wanted(self, stage: StageName) -> str:
        upstream = {name: manifest.fingerprint for name, manifest in self.upstream(stage).items()}
        return fingerprint(stage, self.at(stage), config={}, inputs={}, hooks={}, upstream=upstream)

    def at(self, stage: StageName) -> int:
        return -1 if stage == "policy" else 0

    def commit(self, stage: StageName, files: tuple[str, ...] | None = None) -> Manifest:
        attempt = self.store.open_attempt(
            stage, self.at(stage), self.wanted(stage), self.upstream(stage), resumable=False
        )
        parts = [
            write_file(self.store.files, attempt.path(name), f"{stage}/{name} holds this".encode())
            for name in files or FILES[stage]
        ]
        return self.store.commit(
            attempt,
            parts=parts,
            upstream=self.upstream(stage),
            affecting_config={},
            inputs={},
            versions={},
            started_at=0.0,
            summary={},
            flow_run_id=None,
        )

    def find(self, stage: StageName) -> Manifest | None:
        return self.store.find(stage, self.at(stage), self.wanted(stage), self.upstream(stage))

    def part(self, stage: StageName, name: str) -> Part:
        (found,) = self.made[stage].under(name)
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    made = WholeRun(FolderRoot(tmp_path_factory.mktemp("whole")))
    for stage in FILES:
        assert made.find(stage) == made.made[stage] == made.store.on_line(stage, made.at(stage))
    return made


@pytest.fixture
def run(whole: WholeRun, root: FolderRoot) -> WholeRun:
    """A copy of the whole run that a test may damage."""
    for name in whole.root.names():
        root.put(name, whole.root.get(name))
    made = copy.copy(whole)
    made.root, made.store = root, RunStore(root.files, "r")
    return made


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


CHANGES: dict[str, tuple[Callable[[bytes], bytes | None], str, bool]] = {
    "missing": (lambda data: None, "is missing", True),
    "truncated": (lambda data: data[:-1], "bytes, its manifest says", True),
    "empty": (lambda data: b"", "has 0 bytes, its manifest says", True),
    "flipped": (flipped, "does not have the SHA-256", False),
    "foreign": (lambda data: bytes(len(data)), "does not have the SHA-256", False),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(("stage", "name"), PARTS)
def test_a_damaged_part_is_found_before_use_and_named(
    stage: StageName, name: str, kind: str, run: WholeRun, root: FolderRoot
) -> None:
    """Cache hit, blob missing (pitfall 47): whatever file of a stage it is, beside the rows too."""
    change, says, at_a_look = CHANGES[kind]
    part = run.part(stage, name)
    data = change(root.get(part.path))
    root.remove(part.path)
    if data is not None:
        root.put(part.path, data)
    with pytest.raises(DamagedError) as caught:
        read_bytes(run.store.files, part)
    assert root.files.url(part.path) in str(caught.value) and says in str(caught.value)
    if not at_a_look:
        assert run.store.damage(run.made[stage]) is None
        run.store.verify(run.made[stage])
    assert says in (run.store.damage(run.made[stage]) or "")
    assert run.find(stage) is None
    again = run.commit(stage)
    assert again.attempt == f"{run.made[stage].attempt}.2"
    assert again.content_digest == run.made[stage].content_digest
    assert run.find(stage) == again
    for later in FILES:
        if later != stage:
            assert run.find(later) == run.made[later]


@pytest.mark.parametrize("stage", FILES)
def test_a_file_that_no_manifest_names_is_no_part(stage: StageName, run: WholeRun, root: FolderRoot) -> None:
    folder = run.made[stage].folder
    for name in ("data/99999999-1.parquet", "adapter/stray.bin", "stray"):
        root.put(f"{folder}/{name}", b"stray")
    found = run.find(stage)
    assert found == run.made[stage]
    assert [part.path.removeprefix(f"{folder}/") for part in found.parts] == sorted(FILES[stage])


@pytest.mark.parametrize("stage", FILES)
def test_a_manifest_of_a_newer_program_is_refused(stage: StageName, run: WholeRun, root: FolderRoot) -> None:
    path = f"{run.made[stage].folder}/manifest.json"
    root.put(path, json.dumps(json.loads(root.get(path)) | {"schema_version": 2, "unknown": 1}).encode())
    for look in (run.find, lambda s: run.store.on_line(s, run.at(s))):
        with pytest.raises(InputError) as caught:
            look(stage)
        assert path in str(caught.value) and "use the newer program" in str(caught.value)


@pytest.mark.parametrize("stage", FILES)
def test_a_half_copied_stage_is_told_from_a_whole_one(stage: StageName, run: WholeRun, root: FolderRoot) -> None:
    """Side files not cloned on resume (pitfall 47): a copy without one of them is damaged, one without its manifest is
    no stage, a whole one is whole."""
    folder = run.made[stage].folder.replace("r/", "copy/", 1)
    copied = RunStore(root.files, "copy")
    names = [name for name in root.names() if name.startswith(f"{run.made[stage].folder}/")]
    for name in names:
        if not name.endswith("manifest.json"):
            root.put(name.replace("r/", "copy/", 1), root.get(name))
    assert copied.committed(stage, run.at(stage)) == []
    root.put(f"{folder}/manifest.json", root.get(f"{run.made[stage].folder}/manifest.json"))
    (whole,) = copied.committed(stage, run.at(stage))
    assert copied.damage(whole) is None
    for name in FILES[stage]:
        data = root.get(f"{folder}/{name}")
        root.remove(f"{folder}/{name}")
        assert copied.damage(whole) == f"{root.files.url(folder)}/{name} is missing"
        root.put(f"{folder}/{name}", data)


@pytest.mark.parametrize("stage", [stage for stage in FILES if len(FILES[stage]) > 1])
def test_a_try_that_broke_off_lends_no_file_to_the_next(stage: StageName, run: WholeRun, root: FolderRoot) -> None:
    """Side files not cloned on resume (pitfall 47): the next try has all of its own, in its own folder."""
    root.remove(f"{run.made[stage].folder}/manifest.json")
    root.remove(f"{run.made[stage].folder}/{FILES[stage][-1]}")
    again = run.commit(stage)
    assert again.folder != run.made[stage].folder
    assert all(part.path.startswith(f"{again.folder}/") for part in again.parts)
    assert again.content_digest == run.made[stage].content_digest
    assert run.store.damage(again) is None
    for name in FILES[stage]:
        assert root.get(f"{again.folder}/{name}") == f"{stage}/{name} holds this".encode()
